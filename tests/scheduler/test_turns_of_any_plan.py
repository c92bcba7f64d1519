"""Whatever the plan, whoever is quicker, whoever is lost, and whenever the user stops it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from any_plan import plans
from hypothesis import event, given, settings
from hypothesis import strategies as st
from plan_watch import Watch

from dagrl.scheduler.commands import (
    BatchShort,
    Command,
    CommandDone,
    Event,
    Run,
    ShardDone,
    StopRequested,
    WorkerLost,
)
from dagrl.scheduler.plan import HOST, Plan
from dagrl.scheduler.scheduler import Scheduler


class Play:
    """One run, in which chance says what ends next, who is lost and when the user stops it."""

    def __init__(self, plan: Plan, chance: Random, *, losses: int, stops: bool) -> None:
        self.plan, self.chance, self.losses = plan, chance, losses
        self.first_step = chance.randint(1, plan.steps)
        self.scheduler, self.watch = Scheduler(plan, self.first_step), Watch(plan, self.first_step)
        self.stop_at = chance.randint(0, 60) if stops else None
        self.mortal = [name for name, each in plan.executors.items() if name != HOST and not each.trained]
        self.hastes = {name: chance.choice([0.02, 1.0, 1.0]) for name in plan.executors}
        self.pending: list[Command] = []
        self.streamed: dict[Command, list[int]] = {}

    def to_the_end(self) -> None:
        self._begin(self.scheduler.start())
        events = 0
        while not self.scheduler.finished:
            assert self.pending, "nothing is under way and nothing may start: a deadlock"
            assert events < 3000, "no end in sight"
            events += 1
            if events == self.stop_at:
                self.watch.stop()
                self._begin(self.scheduler.handle(StopRequested()))
            elif self.losses and self.mortal and self.chance.random() < 0.05:
                self._lose(self.chance.choice(self.mortal))
            else:
                self._begin(self.scheduler.handle(*self._happens()))

    def _happens(self) -> Iterator[Event]:
        """Something, and perhaps more at the same time."""
        yield self._go_on(self._next())
        while self.pending and self.chance.random() < 0.3:
            yield self._go_on(self._next())

    def _next(self) -> Command:
        return self.chance.choices(self.pending, [self._haste(each) for each in self.pending])[0]

    def _haste(self, command: Command) -> float:
        """How likely a command is to end next, against others."""
        if self.watch.is_behind(command):
            return 0.0
        return min((self.hastes[name] for name in self.watch.workers(command)), default=1.0)

    def _begin(self, commands: list[Command]) -> None:
        for command in commands:
            self.watch.begin(command)
            self.pending.append(command)
            if isinstance(command, Run) and self.watch.task_of[command.task].streams:
                self.streamed[command] = list(command.shards)
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

    def _lose(self, name: str) -> None:
        self.losses -= 1
        gone = self.watch.lose(name)
        self.pending = [each for each in self.pending if each not in gone]
        self._begin(self.scheduler.handle(WorkerLost(name)))


@settings(deadline=None, max_examples=150)
@given(plan=plans(), losses=st.integers(0, 4), stops=st.booleans(), seed=st.integers(0, 2**32))
def test_every_task_runs_once_and_no_two_overlap_on_shared_devices(plan, losses, stops, seed):
    # Chance of its own is quicker than hypothesis's, and goes further.
    for each in range(seed, seed + 4):
        play = Play(plan, Random(each), losses=losses, stops=stops)
        play.to_the_end()
        came_to_its_end(play)
        event(f"restarts: {bool(play.watch.restarts)}")
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
        assert watch.commits == list(range(first, plan.steps + 1))
        assert expected == watch.arrived
    saved = {step for step, _ in watch.saves}
    assert saved >= {step for step in watch.commits if step > 0 and plan.saves(step)}
    if not any(each.sleeps for each in plan.executors.values()):
        assert watch.moves == 0
    if not plan.in_flight:
        assert watch.in_flight == 0
