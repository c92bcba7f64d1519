"""Updates in pieces, and weights that come to a generator in the midst of its run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_parts import ONE_RANK, executor, task

from dagrl.config.schema import Scope
from dagrl.scheduler.commands import (
    Command,
    CommandDone,
    Event,
    Run,
    Save,
    ShardDone,
    StopRequested,
    Sync,
)
from dagrl.scheduler.plan import HOST, Executor, Plan
from dagrl.scheduler.scheduler import Scheduler

ALL = (0, 1, 2)


def plan(pieces=((0, 1), (2,)), **settings) -> Plan:
    executors = [
        Executor(HOST, None, ONE_RANK * 3),
        executor("actor", "train", trained=True),
        executor("generator", "rollout", weights_from="actor"),
    ]
    tasks = (
        task("prompts", HOST, scope=Scope.BATCH),
        task("rollout", "generator", "prompts", streams=True, generates=True),
        task("reward", HOST, "rollout"),
        task("update", "actor", "reward", scope=Scope.BATCH, trains=True, pieces=pieces),
    )
    return Plan({each.name: each for each in executors}, tasks, **{"shards": 3, "steps": 2, **settings})


def run(task: str, *shards: int, step: int = 1) -> Run:
    return Run(step, task, shards)


def at_rollout(scheduler: Scheduler, step: int) -> None:
    """Carry commands out, oldest first, until the rollout of `step` is all that is left."""
    pending = scheduler.start()
    while pending != [Run(step, "rollout", ALL)]:
        pending += scheduler.handle(CommandDone(pending.pop(0)))


def test_a_piece_runs_as_soon_as_its_shards_are_there_and_the_piece_before_is_over():
    scheduler = Scheduler(plan())
    at_rollout(scheduler, 1)
    table: list[tuple[Event, list[Command]]] = [
        (ShardDone(1, "rollout", 2), [run("reward", 2)]),
        # The second piece has all its inputs, and waits for the first.
        (CommandDone(run("reward", 2)), []),
        (ShardDone(1, "rollout", 0), [run("reward", 0)]),
        (CommandDone(run("reward", 0)), []),
        (ShardDone(1, "rollout", 1), [run("reward", 1)]),
        (CommandDone(run("reward", 1)), [run("update", 0, 1)]),
        (CommandDone(run("rollout", *ALL)), []),
        # The last one: nothing else has to be done for the next step to begin.
        (CommandDone(run("update", 0, 1)), [run("update", 2), run("prompts", *ALL, step=2)]),
    ]
    for event, expected in table:
        assert scheduler.handle(event) == expected, event
    assert scheduler.version("actor") == 0
    scheduler.handle(CommandDone(run("update", 2)))
    assert scheduler.version("actor") == 1


def test_between_mini_batches_only_readers_of_the_start_weights_run():
    base = plan(max_staleness=1, steps=4)
    old, ref = task("old", "actor", "rollout"), task("ref", "actor", "rollout", frozen=True)
    clip_cov_mask = run("reward", 2)
    scheduler = Scheduler(replace(base, tasks=(*base.tasks, old, ref)))
    begun = everything_but(clip_cov_mask, scheduler)
    update = begun.index(run("update", 0, 1))
    later = begun[update + 1 :]
    assert {run("ref", shard, step=2) for shard in ALL} <= {*later}
    assert run("update", 2) not in later
    assert not any(isinstance(each, Sync) or (isinstance(each, Run) and each.task == "old") for each in later)
    # Once it is over they do.
    begun = everything_but(None, scheduler, [clip_cov_mask])
    assert begun.index(run("update", 2)) < begun.index(run("old", 0, step=2))
    assert any(isinstance(each, Sync) and each.step == 3 for each in begun)


def everything_but(
    clip_cov_mask: Run | None, scheduler: Scheduler, pending: list[Command] | None = None
) -> list[Command]:
    """Carry commands out until nothing is under way but `clip_cov_mask`; all that were begun."""
    pending = scheduler.start() if pending is None else pending
    begun = []
    while pending:
        command = pending.pop(0)
        begun.append(command)
        if command != clip_cov_mask:
            pending += scheduler.handle(CommandDone(command))
    return begun


def test_an_engine_is_saved_after_its_last_piece():
    scheduler = Scheduler(plan(save_every=1))
    pending, begun = scheduler.start(), []
    while not scheduler.finished:
        begun.append(pending.pop(0))
        pending += scheduler.handle(CommandDone(begun[-1]))
    on_actor = [each for each in begun if isinstance(each, Save) or (isinstance(each, Run) and each.task == "update")]
    assert on_actor == [
        each
        for step in (1, 2)
        for each in (run("update", 0, 1, step=step), run("update", 2, step=step), Save(step, "actor"))
    ]


@pytest.mark.parametrize("pieces", [((0,), (1,)), ((0, 1), (1, 2)), ((0, 1, 2), ())])
def test_pieces_that_leave_a_shard_out_or_have_it_twice_are_no_plan(pieces):
    with pytest.raises(AssertionError, match="pieces of update"):
        Scheduler(plan(pieces))


def beside_a_run(scheduler: Scheduler, *, stopped: bool = False) -> list[Command]:
    """What begins when update 1 ends while rollout 2 is under way, and after it."""
    at_rollout(scheduler, 1)
    pending = scheduler.handle(CommandDone(run("rollout", *ALL)))
    while not {run("update", *ALL), run("rollout", *ALL, step=2)} <= {*pending}:
        others = [each for each in pending if each.task not in ("update", "rollout")]
        pending.remove(others[0])
        pending += scheduler.handle(CommandDone(others[0]))
    if stopped:
        assert scheduler.handle(StopRequested()) == []
    return scheduler.handle(CommandDone(run("update", *ALL)))


def test_in_flight_weights_come_to_a_generator_at_work():
    scheduler = Scheduler(plan(pieces=(), max_staleness=1, steps=4, in_flight=True))
    sync = Sync(2, "generator", "actor", 1)
    begun = beside_a_run(scheduler)
    assert sync in begun
    # One at a time, and nothing that needs the source.
    (commit,) = [each for each in begun if not isinstance(each, Sync | Run)]
    begun = scheduler.handle(CommandDone(commit))
    assert not any(isinstance(each, Sync) for each in begun)
    # The run may end before the sync: then its generator is still taken.
    begun = scheduler.handle(CommandDone(run("rollout", *ALL, step=2)))
    assert not any(isinstance(each, Run) and each.task in ("rollout", "update") for each in begun)
    scheduler.handle(CommandDone(sync))
    assert scheduler.version("generator") == 1


def test_without_in_flight_weights_wait_for_the_end_of_the_run():
    begun = beside_a_run(Scheduler(plan(pieces=(), max_staleness=1, steps=4)))
    assert not any(isinstance(each, Sync) for each in begun)


def test_a_run_that_a_stop_has_dropped_gets_no_weights_before_the_last_save():
    scheduler = Scheduler(plan(pieces=(), max_staleness=1, steps=4, in_flight=True))
    assert beside_a_run(scheduler, stopped=True) == [Save(1, "actor")]
