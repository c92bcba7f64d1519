"""A task's way through the steps: in which of them it is ready, and for whom it clears the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from dagrl.scheduler.commands import Run
from dagrl.scheduler.plan import Executor, Plan, PlannedTask
from dagrl.scheduler.progress import Cut, TaskProgress


@dataclass(slots=True)
class OpenStep:
    """What has happened in one step."""

    tasks: dict[str, TaskProgress]
    left: int
    """Tasks that are not done."""
    sure: int = 0
    """Those of them that will be without anything else: updates whose last piece is under way."""
    round: int = 0
    """Of the tasks that run in rounds."""


class Lane:
    """One task's way through the open steps."""

    def __init__(
        self, task: PlannedTask, executor: Executor, place: int, cut: Cut, open_steps: Mapping[int, OpenStep]
    ) -> None:
        """`place` of the task in a step."""
        self.task, self.executor, self.place, self.cut = task, executor, place, cut
        self.is_source = not task.inputs
        self.readers: list[Lane] = []
        """Lanes of the tasks that wait until this one is done."""
        self.readers_behind: list[Lane] = []
        """Lanes of those that may be sent behind it."""
        self._waits_for_sources_alone = False
        """Whether all that the task waits for are sources."""
        self.ends: list[Lane] = [self] if self.is_source and not task.in_rounds else []
        """Sources that are through with a step when this task is done."""
        self._open = open_steps
        self._undone: deque[int] = deque()
        self._ready: list[int] = []
        """Heap of steps; some may be ready no more."""
        self._noted: set[int] = set()

    def enter(self, step: int) -> None:
        """A step that has the task is open; they open in order."""
        if self.is_source:
            self._undone.append(step)

    def leave(self, step: int) -> None:
        """The task is done in `step`: sources that wait for that may go on to the next."""
        for source in self.ends:
            first = source._undone.popleft()
            assert first == step, f"{source.task.name} of {step} is done before that of {first}"

    @property
    def oldest_undone(self) -> int:
        """The oldest step with which the task, which is a source, is not through."""
        return self._undone[0]

    def ends_training(self, run: Run) -> bool:
        """Whether `run`, of this task, is an update's last."""
        return self.task.trains and run.shards == self.cut.last_piece

    def round_in(self, step: int) -> int:
        """The round in which the task is in `step`; 0 where it does not run in rounds."""
        return self._open[step].round if self.task.in_rounds else 0

    def note(self, step: int) -> None:
        """The task has become ready in `step`."""
        if step not in self._noted:
            self._noted.add(step)
            heappush(self._ready, step)

    def progress(self, step: int) -> TaskProgress:
        """How far the task is in `step`, which is open and has it."""
        return self._open[step].tasks[self.task.name]

    def has_left(self, step: int) -> bool:
        """Whether `step`, which is open, has the task, and is not through with it."""
        progress = self._open[step].tasks.get(self.task.name)
        return progress is not None and progress.left > 0

    def soon(self) -> int | None:
        """The oldest step in which the task is ready, or will be when its prompts are read."""
        step = self.oldest()
        if step is None and self._waits_for_sources_alone:
            return next((step for step in self._open if self.has_left(step)), None)
        return step

    def oldest(self) -> int | None:
        """The oldest step in which the task is ready."""
        while self._ready:
            step = self._ready[0]
            if step in self._open and self._open[step].tasks[self.task.name].ready:
                return step
            self._noted.discard(heappop(self._ready))
        return None


def lanes_of(plan: Plan, open_steps: Mapping[int, OpenStep]) -> dict[str, Lane]:
    """The lane of each task by its name, connected with those of the tasks that wait for it."""
    waits_for = {task.name: plan.waits_for(task) for task in plan.tasks}
    lanes = {
        task.name: Lane(
            task,
            plan.executors[task.executor],
            place,
            Cut(task, plan.shards, len(waits_for[task.name])),
            open_steps,
        )
        for place, task in enumerate(plan.tasks)
    }
    for name, lane in lanes.items():
        for need in waits_for[name]:
            behind = plan.promises(lanes[need].task) and lanes[need].executor is lane.executor
            (lanes[need].readers_behind if behind else lanes[need].readers).append(lane)
        lane._waits_for_sources_alone = all(lanes[need].is_source for need in waits_for[name])
        if lane.task.selects:
            # Only now it is known where in the data the next step begins.
            lane.ends += [each for each in lanes.values() if each.is_source and each.task.in_rounds]
    return lanes
