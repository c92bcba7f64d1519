"""Whatever the plan, whoever is quicker, whoever is lost, and whenever the user stops it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from any_plan import plans
from hypothesis import event, given, settings
from hypothesis import strategies as st
from plan_watch import Watch

from dagrl.scheduler.commands import (
    BatchShort,
    Command,
    CommandDone,
    Event,
    LastStep,
    Run,
    ShardDone,
    StopRequested,
    Sync,
    WorkerLost,
)
from dagrl.scheduler.plan import HOST, Plan, Rows
from dagrl.scheduler.scheduler import Scheduler


class Play:
    """One run, in which chance says what ends next or never, who is lost, when data end and when the user stops it."""

    def __init__(self, plan: Plan, chance: Random, *, losses: int, stops: bool) -> None:
        self.plan, self.chance, self.losses = plan, chance, losses
        self.hangs, self.ends_early = losses > 0 and chance.random() < 0.5, chance.random() < 0.2
        self.first_step = chance.randint(1, plan.steps)
        self.scheduler, self.watch = Scheduler(plan, self.first_step), Watch(plan, self.first_step)
        self.stop_at = chance.randint(0, 60) if stops else None
        self.mortal = [name for name, each in plan.executors.items() if name != HOST and not each.trained]
        self.hastes = {name: chance.choice([0.02, 1.0, 1.0]) for name in plan.executors}
        self.hastes |= {each.name: chance.choice([0.02, 1.0, 1.0, 1.0]) for each in plan.tasks}
        self.haste_of_syncs = chance.choice([0.02, 1.0, 1.0])
        self.hung: dict[Command, str] = {}
        """Command that never ends -> the executor that is lost when its time is out."""
        self.back = 0
        """How often all of the run went back to its last checkpoint."""
        self.pending: list[Command] = []
        self.streamed: dict[Command, list[int]] = {}

    def to_the_end(self) -> None:
        self._begin(self.scheduler.start())
        events = 0
        while not self.scheduler.finished:
            assert events < 3000, "no end in sight"
            events += 1
            if events == self.stop_at:
                self.watch.stop()
                self._begin(self.scheduler.handle(StopRequested()))
            elif self.losses and self.chance.random() < 0.05:
                self.losses -= 1
                if self.chance.random() < 0.3:
                    self._lose_group(self.chance.choice(sorted(self.plan.groups)))
                elif self.mortal:
                    self._lose(self.chance.choice(self.mortal))
            elif not any(self._haste(each) for each in self.pending):
                self._lose(self.hung[next(each for each in self.pending if each in self.hung)])
            else:
                self._begin(self.scheduler.handle(*self._happens()))

    def _happens(self) -> Iterator[Event]:
        """Something, and perhaps more at the same time."""
        yield from self._end_of_data(ended := self._next())
        yield self._go_on(ended)
        while any(self._haste(each) for each in self.pending) and self.chance.random() < 0.3:
            yield from self._end_of_data(ended := self._next())
            yield self._go_on(ended)

    def _next(self) -> Command:
        return self.chance.choices(self.pending, [self._haste(each) for each in self.pending])[0]

    def _haste(self, command: Command) -> float:
        """How likely a command is to end next, against others."""
        if command in self.hung or self.watch.is_behind(command):
            return 0.0
        names = [*self.watch.workers(command), *([command.task] if isinstance(command, Run) else [])]
        slow = self.haste_of_syncs if isinstance(command, Sync) else 1.0
        return min((self.hastes[name] for name in names), default=1.0) * slow

    def _begin(self, commands: list[Command]) -> None:
        self.scheduler.validate_state()
        for command in commands:
            self.watch.begin(command)
            self.pending.append(command)
            if isinstance(command, Run) and self.watch.task_of[command.task].streams:
                self.streamed[command] = list(command.shards)
            may_hang = [name for name in self.watch.workers(command) if name in self.mortal]
            if self.hangs and may_hang and self.chance.random() < 0.03:
                self.hung[command] = may_hang[0]
        assert self.scheduler.stopping or not self.watch.overlooked()

    def _go_on(self, command: Command) -> Event:
        if self.streamed.get(command) and self.chance.random() < 0.7:
            shard = self.streamed[command].pop(self.chance.randrange(len(self.streamed[command])))
            ended: Event = ShardDone(command.step, command.task, shard, command.round)
            self.watch.shard(ended)
        elif self._is_short(command):
            self.pending.remove(command)
            self.watch.short(command)
            ended = BatchShort(command)
        else:
            self.pending.remove(command)
            self.watch.end(command)
            ended = CommandDone(command)
        return ended

    def _is_short(self, command: Command) -> bool:
        """Whether chance wants a further round."""
        if not isinstance(command, Run) or not self.watch.task_of[command.task].selects:
            return False
        return command.round < 3 and self.chance.random() < 0.5

    def _end_of_data(self, command: Command) -> Iterator[Event]:
        """Before the end of a source's run, the word that its step, or the one before, is the last."""
        if not (self.ends_early and isinstance(command, Run) and command.step > 0 and not self.scheduler.stopping):
            return
        task = self.watch.task_of[command.task]
        if task.rows is Rows.TRAIN and not task.needs and self.chance.random() < 0.2:
            self.ends_early = False
            self.watch.end_with(command.step)
            yield LastStep(command.step)

    def _lose(self, *names: str) -> None:
        for name in names:
            gone = self.watch.lose(name)
            self.pending = [each for each in self.pending if each not in gone]
            self.hung = {each: lost for each, lost in self.hung.items() if each not in gone}
        self._begin(self.scheduler.handle(*map(WorkerLost, names)))

    def _lose_group(self, group: str) -> None:
        """A machine is gone, and comes back: with a trained engine, the run goes back to its last checkpoint."""
        names = [name for name, each in self.plan.executors.items() if each.group == group]
        if all(name in self.mortal for name in names):
            self._lose(*names)
        elif not self.scheduler.stopping:
            self.back += 1
            self.first_step = max((step + 1 for step in self.watch.saved), default=self.first_step)
            self.scheduler, self.watch = Scheduler(self.plan, self.first_step), Watch(self.plan, self.first_step)
            self.pending, self.hung, self.streamed = [], {}, {}
            self._begin(self.scheduler.start())


RUNS = {"plan": plans(), "losses": st.integers(0, 4), "stops": st.booleans(), "seed": st.integers(0, 2**32)}


@settings(deadline=None, max_examples=80)
@given(**RUNS)
def test_every_task_runs_once_and_no_two_overlap_on_shared_devices(plan, losses, stops, seed):
    runs_to_its_end(plan, losses, stops, seed)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@settings(deadline=None, max_examples=5000)
@given(**RUNS)
def test_thousands_of_plans_run_to_their_ends(plan, losses, stops, seed):
    runs_to_its_end(plan, losses, stops, seed)


def runs_to_its_end(plan: Plan, losses: int, stops: bool, seed: int) -> None:
    # Chance of its own is quicker than hypothesis's, and goes further.
    for each in range(seed, seed + 4):
        play = Play(plan, Random(each), losses=losses, stops=stops)
        play.to_the_end()
        came_to_its_end(play)
        event(f"restarts: {bool(play.watch.restarts)}")
        event(f"back at a checkpoint: {bool(play.back)}")
        event(f"in flight: {bool(play.watch.in_flight)}")
        event(f"most rounds: {max(play.watch.round.values(), default=0) + 1}")


def came_to_its_end(play: Play) -> None:
    plan, scheduler, watch = play.plan, play.scheduler, play.watch
    first = 0 if plan.validate_first and play.first_step == 1 else play.first_step
    assert watch.commits == list(range(first, first + len(watch.commits)))
    # The watch has seen to it that nothing arrives twice.
    expected = {
        (step, task.name, shard, round_)
        for step in watch.commits
        for task in plan.tasks_of(step)
        # A filter is done with the last round alone.
        for round_ in range(0 if not task.selects else watch.round_of(step, task), 1 + watch.round_of(step, task))
        for shard in range(plan.shards)
    }
    assert expected <= watch.arrived
    if not scheduler.stopping:
        assert watch.commits == list(range(first, watch.last_step + 1))
        # Validation prompts of steps after the end of the data may have been read.
        assert expected == {row for row in watch.arrived if row[0] <= watch.last_step}
    saved = {step for step, _ in watch.saves}
    assert saved >= {step for step in watch.commits if step > 0 and plan.saves(step)}
    if not any(each.sleeps for each in plan.executors.values()):
        assert watch.moves == 0
    if not plan.in_flight:
        assert watch.in_flight == 0
