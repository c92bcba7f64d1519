"""A filter that lets too few groups pass: what is before it runs again, what is behind it waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from executed_lines import lines_of
from plan_parts import ONE_RANK, executor, task

from dagrl.config.residency import Residency
from dagrl.config.schema import Scope
from dagrl.planner.simulation.costs import CostTable
from dagrl.planner.simulation.simulate import simulate
from dagrl.scheduler.commands import (
    BatchShort,
    Command,
    CommandDone,
    Commit,
    Event,
    Restart,
    Run,
    Save,
    ShardDone,
    Sleep,
    StopRequested,
    Sync,
    Wake,
    WorkerLost,
)
from dagrl.scheduler.plan import HOST, Executor, Plan
from dagrl.scheduler.scheduler import Scheduler

ALL = (0, 1)


def plan(*, groups: tuple[str, str] = ("train", "rollout"), sleeps: bool = False, **settings) -> Plan:
    """rollout -> reward -> filter, and behind it a reference, whose columns it does not look at, and the update."""
    executors = [
        Executor(HOST, None, ONE_RANK * 2),
        executor("actor", groups[0], trained=True, sleeps=sleeps),
        executor("generator", groups[1], weights_from="actor", sleeps=sleeps),
        executor("reference", "third"),
    ]
    tasks = (
        task("prompts", HOST, scope=Scope.BATCH, in_rounds=True),
        task("rollout", "generator", "prompts", streams=True, generates=True, in_rounds=True),
        task("reward", HOST, "rollout", in_rounds=True),
        task("filter", HOST, "reward", scope=Scope.BATCH, in_rounds=True, selects=True),
        task("ref", "reference", "rollout", frozen=True),
        task("update", "actor", "ref", "reward", scope=Scope.BATCH, trains=True),
    )
    return Plan({each.name: each for each in executors}, tasks, **{"shards": 2, "steps": 1, **settings})


def run(task: str, *shards: int, step: int = 1, at: int = 0) -> Run:
    return Run(step, task, shards or ALL, at)


def test_a_step_in_two_rounds():
    scheduler = Scheduler(plan())
    sync = Sync(1, "generator", "actor", 0)
    assert scheduler.start() == [sync, run("prompts")]
    table: list[tuple[Event, list[Command]]] = [
        (CommandDone(run("prompts")), [run("rollout")]),
        (CommandDone(sync), []),
        (ShardDone(1, "rollout", 0), [run("reward", 0)]),
        (CommandDone(run("rollout")), [run("reward", 1)]),
        (CommandDone(run("reward", 0)), []),
        (CommandDone(run("reward", 1)), [run("filter")]),
        (BatchShort(run("filter")), [run("prompts", at=1)]),
        (CommandDone(run("prompts", at=1)), [run("rollout", at=1)]),
        (CommandDone(run("rollout", at=1)), [run("reward", 0, at=1), run("reward", 1, at=1)]),
        (CommandDone(run("reward", 1, at=1)), []),
        (CommandDone(run("reward", 0, at=1)), [run("filter", at=1)]),
        # Full: what is behind the filter runs once, whatever the rounds.
        (CommandDone(run("filter", at=1)), [run("ref", 0), run("ref", 1)]),
        (CommandDone(run("ref", 0)), []),
        (CommandDone(run("ref", 1)), [run("update")]),
        (CommandDone(run("update")), [Save(1, "actor")]),
        (CommandDone(Save(1, "actor")), [Commit(1, save=True)]),
    ]
    for event, expected in table:
        assert scheduler.handle(event) == expected, event


class Play:
    """Carries commands out, oldest first; the filter of each step has so many rounds."""

    def __init__(self, plan: Plan, rounds: dict[int, int]) -> None:
        self.scheduler, self.rounds = Scheduler(plan), rounds
        self.pending = self.scheduler.start()
        self.begun = list(self.pending)

    def tell(self, event: Event) -> None:
        new = self.scheduler.handle(event)
        self.pending += new
        self.begun += new

    def until(self, command: Command | None = None) -> None:
        """Until `command` is under way, or to the end."""
        while (command not in self.pending) if command else not self.scheduler.finished:
            first = self.pending.pop(0)
            assert isinstance(first, Command)
            short = isinstance(first, Run) and first.task == "filter" and first.round + 1 < self.rounds[first.step]
            self.tell(BatchShort(first) if isinstance(first, Run) and short else CommandDone(first))


def test_the_next_step_takes_its_prompts_when_the_position_in_the_data_is_known():
    play = Play(plan(steps=3, max_staleness=2), {1: 2, 2: 1, 3: 3})
    play.until()
    taken = [each for each in play.begun if isinstance(each, Run) and each.task in ("prompts", "filter")]
    assert taken == [
        run(name, step=step, at=at)
        for step, rounds in play.rounds.items()
        for at in range(rounds)
        for name in ("prompts", "filter")
    ]
    # It does not wait for more than that.
    before = play.begun.index(run("prompts", step=2)), play.begun.index(run("ref", 0))
    assert before == (min(before), max(before))


def test_a_generator_that_takes_turns_stays_awake_from_round_to_round():
    play = Play(plan(groups=("gpus", "gpus"), sleeps=True, steps=1), {1: 3})
    play.until(run("rollout"))
    moves = len([each for each in play.begun if isinstance(each, Sleep | Wake)])
    play.until(run("rollout", at=2))
    assert len([each for each in play.begun if isinstance(each, Sleep | Wake)]) == moves
    assert [each for each in play.begun if isinstance(each, Sync)] == [Sync(1, "generator", "actor", 0)]
    play.until()
    assert play.scheduler.residency("generator") is Residency.ASLEEP


def test_a_round_continues_after_its_generator_is_lost():
    play = Play(plan(), {1: 2})
    lost = run("rollout", at=1)
    play.until(lost)
    play.pending.remove(lost)
    play.tell(ShardDone(1, "rollout", 1, 1))
    play.tell(WorkerLost("generator"))
    play.until()
    again = play.begun[play.begun.index(lost) + 1 :]
    assert Restart(1, "generator") in again
    assert [each for each in again if isinstance(each, Run) and each.task == "rollout"] == [run("rollout", 0, at=1)]


def test_late_responses_of_an_earlier_round_are_ignored():
    play = Play(plan(), {1: 2})
    early = run("rollout")
    play.until(early)
    play.pending.remove(early)
    # All shards have come, though the run is not over: servers are still stopping what nobody needs.
    for shard in ALL:
        play.tell(ShardDone(1, "rollout", shard))
    play.until(run("prompts", at=1))
    play.tell(CommandDone(play.pending.pop()))
    assert play.pending == [], "the generator is still taken"
    play.tell(CommandDone(early))
    assert play.pending == [run("rollout", at=1)]
    play.until()


def test_after_a_stop_the_oldest_step_still_gets_its_rounds_and_a_younger_one_none():
    play = Play(plan(steps=4, max_staleness=1), {1: 1, 2: 3, 3: 3, 4: 3})
    play.until(run("filter", at=1, step=2))
    play.tell(StopRequested())
    play.until()
    commits = [each for each in play.begun if isinstance(each, Commit)]
    rounds = {each.step: each.round for each in play.begun if isinstance(each, Run) and each.task == "filter"}
    assert commits == [Commit(1, save=False), Commit(2, save=True)]
    assert rounds == {1: 0, 2: 2}


SECONDS = CostTable({"prompts": 0.5, "rollout": 3.0, "reward": 1.0, "ref": 1.0, "update": 2.0})


@pytest.mark.parametrize(("rounds", "seconds"), [(1, 1.0 + 6.0 + 1.0), (3, 3 * (1.0 + 6.0 + 1.0))])
def test_a_simulation_has_the_rounds_that_the_plan_counts_with(rounds, seconds):
    simulated = simulate(plan(expected_rounds=rounds), SECONDS, 1)
    # Two shards of each; the reward of the second comes behind the rollout.
    assert simulated.step_seconds == {1: seconds + 2.0 + 4.0}
    assert len([each for each in simulated.activities if each.name == "rollout"]) == 2 * rounds
    assert len([each for each in simulated.activities if each.name == "ref"]) == 2


def test_an_event_costs_as_much_in_whatever_round():
    def lines_a_round(rounds: int) -> float:
        of = replace(plan(shards=20), expected_rounds=rounds)
        return lines_of(lambda: simulate(of, SECONDS, 1)) / rounds

    assert lines_a_round(50) <= lines_a_round(5)
