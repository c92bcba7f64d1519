"""The state of a task over all open steps: where it is ready, and which tasks wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from dagrl.scheduler.commands import Run
from dagrl.scheduler.plan import Executor, Plan, PlannedTask
from dagrl.scheduler.progress import ShardOrder, TaskProgress


@dataclass(slots=True)
class OpenStep:
    """The progress of one step."""

    tasks: dict[str, TaskProgress]
    left: int
    """Tasks that are not done."""
    ending: int = 0
    """Runs among them that only wait for themselves: updates whose last piece is running."""
    round: int = 0
    """Dynamic-sampling round."""


class TaskState:
    """One task in all open steps."""

    def __init__(
        self, task: PlannedTask, executor: Executor, place: int, order: ShardOrder, open_steps: Mapping[int, OpenStep]
    ) -> None:
        """`place`: index of the task in a step."""
        self.task, self.executor, self.place, self.order = task, executor, place, order
        self.is_source = not task.inputs
        self.in_order = self.is_source or task.replays or task.in_order
        """Whether it runs in one step after the other, however far ahead the others are."""
        self.readers: list[TaskState] = []
        """Tasks that wait until this one is done."""
        self.queued_readers: list[TaskState] = []
        """Tasks that may be queued behind this one."""
        self.needs_sources_only = False
        """Whether the task waits for sources alone."""
        self.ends: list[TaskState] = [self] if self.in_order and not task.in_rounds else []
        """Tasks in order whose step ends when this task is done."""
        self._open = open_steps
        self._undone: deque[int] = deque()
        self._ready: list[int] = []
        """Heap of steps. Some may no longer be ready."""
        self._in_heap: set[int] = set()

    def enter(self, step: int) -> None:
        """A step with the task opens. Steps open in order."""
        if self.in_order:
            self._undone.append(step)

    def leave(self, step: int) -> None:
        """The task is done in `step`: tasks in order that wait for it continue with the next step."""
        for state in self.ends:
            first = state._undone.popleft()
            assert first == step, f"{state.task.name} of {step} is done before that of {first}"

    @property
    def oldest_undone(self) -> int:
        """The oldest step in which this task, which runs in order, is not done."""
        return self._undone[0]

    def ends_training(self, run: Run) -> bool:
        """Whether `run` is the last piece of an update."""
        return self.task.trains and run.shards == self.order.last_piece

    def round_in(self, step: int) -> int:
        """The round of the task in `step`; 0 if it does not run in rounds."""
        return self._open[step].round if self.task.in_rounds else 0

    def mark_ready(self, step: int) -> None:
        if step not in self._in_heap:
            self._in_heap.add(step)
            heappush(self._ready, step)

    def progress(self, step: int) -> TaskProgress:
        """The task's progress in `step`, which is open and has the task."""
        return self._open[step].tasks[self.task.name]

    def has_left(self, step: int) -> bool:
        """Whether `step`, which is open, has the task and it is not done."""
        progress = self._open[step].tasks.get(self.task.name)
        return progress is not None and progress.left > 0

    def oldest_ready(self) -> int | None:
        while self._ready:
            step = self._ready[0]
            if step in self._open and self._open[step].tasks[self.task.name].ready:
                return step
            self._in_heap.discard(heappop(self._ready))
        return None

    def oldest_soon(self) -> int | None:
        """The oldest step in which the task is ready, or will be once its prompts are read."""
        step = self.oldest_ready()
        if step is None and self.needs_sources_only:
            return next((step for step in self._open if self.has_left(step)), None)
        return step


def make_task_states(plan: Plan, open_steps: Mapping[int, OpenStep]) -> dict[str, TaskState]:
    """The state of each task by name, connected with the tasks that wait for it."""
    waits_for = {task.name: plan.waits_for(task) for task in plan.tasks}
    states = {
        task.name: TaskState(
            task,
            plan.executors[task.executor],
            place,
            ShardOrder(task, plan.shards, len(waits_for[task.name])),
            open_steps,
        )
        for place, task in enumerate(plan.tasks)
    }
    for name, state in states.items():
        needs = [states[need] for need in waits_for[name]]
        for need in needs:
            queued = plan.outputs_are_predictable(need.task) and need.executor is state.executor
            (need.queued_readers if queued else need.readers).append(state)
        state.needs_sources_only = all(need.is_source for need in needs)
        if state.task.selects:
            # Only the filter determines where in the data set the next step begins.
            state.ends += [each for each in states.values() if each.is_source and each.task.in_rounds]
    return states
