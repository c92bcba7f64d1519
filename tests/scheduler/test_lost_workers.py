"""An executor that is not trained loses its workers: they come back, and so does what they had not brought yet."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_parts import ONE_RANK, executor, task

from dagrl.config.residency import Residency
from dagrl.config.schema import Scope
from dagrl.scheduler.commands import (
    Command,
    CommandDone,
    Commit,
    Restart,
    Run,
    ShardDone,
    Sleep,
    StopRequested,
    Sync,
    Wake,
    WorkerLost,
)
from dagrl.scheduler.plan import HOST, Executor, Plan
from dagrl.scheduler.scheduler import Scheduler

ASLEEP, WEIGHTS, AWAKE = Residency.ASLEEP, Residency.WEIGHTS, Residency.AWAKE
ALL = (0, 1, 2)
ROLLOUT = Run(1, "rollout", ALL)


def grpo(*, shared: bool = False, sleeps: bool = False, pieces=(), **settings) -> Plan:
    """A policy and its generator, on two groups or on one, and a reference that is scored shard by shard."""
    executors = [
        Executor(HOST, None, ONE_RANK * 3),
        executor("actor", "train", trained=True, sleeps=sleeps),
        executor("generator", "train" if shared else "rollout", weights_from="actor", sleeps=sleeps and shared),
        executor("reference", "train" if shared else "third", sleeps=sleeps and shared),
    ]
    tasks = (
        task("prompts", HOST, scope=Scope.BATCH),
        task("rollout", "generator", "prompts", streams=True, generates=True),
        task("ref", "reference", "rollout", frozen=True),
        task("update", "actor", "ref", scope=Scope.BATCH, trains=True, pieces=pieces),
    )
    return Plan({each.name: each for each in executors}, tasks, **{"shards": 3, "steps": 2, **settings})


class Play:
    """Carries commands out one after the other; `slow` ones only when nothing else is left."""

    def __init__(self, plan: Plan, slow=()) -> None:
        self.scheduler, self.slow = Scheduler(plan), slow
        self.pending = self.scheduler.start()
        self.begun = list(self.pending)

    def tell(self, event) -> list[Command]:
        commands = self.scheduler.handle(event)
        self.pending += commands
        self.begun += commands
        return commands

    def until(self, reached) -> None:
        while not reached(self.pending):
            self.pending.sort(key=lambda command: isinstance(command, Run) and command.task in self.slow)
            self.tell(CommandDone(self.pending.pop(0)))

    def to_the_end(self) -> list[Command]:
        self.until(lambda pending: self.scheduler.finished)
        return self.begun

    def lose(self, name: str) -> list[Command]:
        gone = [each for each in self.pending if name in self.scheduler.workers_of(each)]
        self.pending = [each for each in self.pending if each not in gone]
        return self.tell(WorkerLost(name))


def test_shards_that_had_arrived_stay_and_the_others_are_run_again_on_weights_that_are_synced_anew():
    play = Play(grpo())
    play.until(lambda pending: ROLLOUT in pending)
    play.tell(ShardDone(1, "rollout", 1))
    restart = Restart(1, "generator")
    assert play.lose("generator") == [restart]
    assert play.scheduler.version("generator") is None
    assert play.scheduler.residency("generator") is ASLEEP
    sync = Sync(1, "generator", "actor", 0)
    # What is left of it is sent behind the weights.
    assert play.tell(CommandDone(Restart(1, "generator"))) == [sync, Run(1, "rollout", (0, 2))]
    play.pending.remove(restart)
    commands = play.to_the_end()
    assert [each.step for each in commands if isinstance(each, Commit)] == [1, 2]


def test_a_lost_run_that_brings_all_at_once_starts_again():
    play = Play(grpo())
    play.until(lambda pending: Run(1, "ref", (0,)) in pending)
    assert play.lose("reference") == [Restart(1, "reference")]
    play.pending.clear()
    assert play.tell(CommandDone(Restart(1, "reference"))) == [Run(1, "ref", (0,))]


def test_no_run_waits_behind_one_on_servers_that_may_restart_alone():
    plan = grpo()
    assert plan.queues("reference") and not plan.restarts("reference")
    servers = {**plan.executors, "reference": replace(plan.executors["reference"], are_servers=True)}
    plan = replace(plan, executors=servers)
    assert plan.restarts("reference") and not plan.queues("reference")
    play = Play(plan)
    play.until(lambda pending: Run(1, "ref", (0,)) in pending)
    assert len([each for each in play.pending if isinstance(each, Run) and each.task == "ref"]) == 1
    assert play.lose("reference") == [Restart(1, "reference")]


def test_on_groups_of_their_own_workers_come_back_before_a_step_waits_for_them():
    play = Play(grpo())
    play.until(lambda pending: Run(1, "update", ALL) in pending)
    assert play.lose("generator") == [Restart(2, "generator")]
    play.until(lambda pending: Run(2, "ref", (0,)) in pending)
    assert play.lose("generator") == []
    assert play.lose("reference") == [Restart(2, "reference")]


def test_in_a_group_that_takes_turns_workers_come_back_when_a_step_waits_for_them():
    play = Play(grpo(shared=True, sleeps=True))
    play.until(lambda pending: Run(1, "update", ALL) in pending)
    assert play.lose("generator") == play.lose("reference") == []
    play.until(lambda pending: Restart(2, "generator") in pending)
    play.until(lambda pending: Restart(2, "reference") in pending)
    assert play.begun[-2:] == [Sleep(2, "generator", ASLEEP), Restart(2, "reference")]


def test_in_a_group_that_takes_turns_the_others_make_room_for_who_comes_back():
    play = Play(grpo(shared=True, sleeps=True))
    play.until(lambda pending: ROLLOUT in pending)
    play.tell(ShardDone(1, "rollout", 0))
    before = len(play.begun)
    play.lose("generator")
    play.until(lambda pending: Run(1, "rollout", (1, 2)) in pending)
    assert play.begun[before:] == [
        Restart(1, "generator"),
        Sleep(1, "generator", WEIGHTS),
        Wake(1, "actor", WEIGHTS),
        Sync(1, "generator", "actor", 0),
        Sleep(1, "actor", ASLEEP),
        Wake(1, "generator", AWAKE),
        Run(1, "rollout", (1, 2)),
    ]


def test_a_generator_lost_in_a_sync_releases_its_source_which_sleeps_first():
    play = Play(grpo(shared=True, sleeps=True))
    sync = Sync(1, "generator", "actor", 0)
    play.until(lambda pending: sync in pending)
    assert play.lose("generator") == [Sleep(1, "actor", ASLEEP)]
    play.until(lambda pending: Restart(1, "generator") in pending)
    play.until(lambda pending: sync in pending)
    play.until(lambda pending: ROLLOUT in pending)


@pytest.mark.parametrize("move", [Wake(1, "generator", WEIGHTS), Wake(1, "generator", AWAKE)])
def test_a_generator_lost_while_waking_restarts_completely(move):
    play = Play(grpo(shared=True, sleeps=True))
    play.until(lambda pending: move in pending)
    play.lose("generator")
    play.until(lambda pending: Restart(1, "generator") in pending)
    play.until(lambda pending: ROLLOUT in pending)
    commands = play.to_the_end()
    assert [each.step for each in commands if isinstance(each, Commit)] == [1, 2]


def test_a_source_that_is_not_trained_comes_back_before_its_weights_are_sent():
    plan = grpo(sleeps=False)
    reference = executor("reference", "rollout")
    generator = executor("generator", "rollout", weights_from="reference")
    play = Play(replace(plan, executors={**plan.executors, "reference": reference, "generator": generator}))
    play.until(lambda pending: Sync(1, "generator", "reference", 0) in pending)
    assert play.lose("reference") == [Restart(1, "reference")]
    play.pending.remove(Restart(1, "reference"))
    assert play.tell(CommandDone(Restart(1, "reference"))) == [Sync(1, "generator", "reference", 0)]


def test_a_lost_restart_is_begun_again():
    play = Play(grpo())
    play.until(lambda pending: ROLLOUT in pending)
    play.lose("generator")
    assert play.lose("generator") == [Restart(1, "generator")]


def test_a_run_of_a_step_that_a_stop_has_dropped_is_not_run_again():
    play = Play(grpo(max_staleness=1, steps=9), slow=("update", "rollout"))
    play.until(lambda pending: {Run(1, "update", ALL), Run(2, "rollout", ALL)} <= {*pending})
    play.tell(StopRequested())
    assert play.lose("generator") == []
    play.to_the_end()
    assert play.scheduler.committed == 1


def test_the_rest_of_a_step_that_is_being_trained_is_sampled_by_the_weights_that_there_are():
    """Pieces of the update have moved the weights: those of before are nowhere, and those of after wait for this."""
    play = Play(grpo(pieces=((0,), (1,), (2,))), slow=("rollout",))
    play.until(lambda pending: ROLLOUT in pending)
    play.tell(ShardDone(1, "rollout", 0))
    play.until(lambda pending: Run(1, "update", (0,)) in pending)
    play.lose("generator")
    assert Restart(1, "generator") in play.pending
    play.pending.remove(Restart(1, "generator"))
    # Not while a piece is at work.
    assert play.tell(CommandDone(Restart(1, "generator"))) == []
    sync = Sync(1, "generator", "actor", 0)
    assert play.tell(CommandDone(Run(1, "update", (0,)))) == [sync, Run(1, "rollout", (1, 2))]
    play.pending.remove(Run(1, "update", (0,)))
    commands = play.to_the_end()
    assert [each for each in commands if isinstance(each, Run) and each.task == "update"][1] == Run(1, "update", (1,))


def test_a_younger_step_waits_for_the_end_of_the_update_that_its_generator_was_lost_in():
    play = Play(grpo(pieces=((0,), (1,), (2,)), max_staleness=1), slow=("rollout", "ref"))
    play.until(lambda pending: {Run(1, "update", (0,)), Run(2, "rollout", ALL)} <= {*pending})
    play.pending.remove(Run(1, "update", (0,)))
    play.tell(CommandDone(Run(1, "update", (0,))))
    assert play.lose("generator") == [Restart(2, "generator")]
    play.pending.remove(Restart(2, "generator"))
    # The weights are those of no step.
    assert play.tell(CommandDone(Restart(2, "generator"))) == []
    syncs = [each for each in play.to_the_end() if isinstance(each, Sync)]
    assert syncs == [Sync(1, "generator", "actor", 0), Sync(2, "generator", "actor", 1)]
