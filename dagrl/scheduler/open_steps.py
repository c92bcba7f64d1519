"""The steps that are open: which is opened next, and what has been done in each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dagrl.scheduler.commands import Run
from dagrl.scheduler.dirty_set import Neighbourhoods
from dagrl.scheduler.plan import Plan
from dagrl.scheduler.task_state import Lane, OpenStep, lanes_of


class OpenSteps:
    """A step opens once the step ``max_staleness + 1`` before it has nothing left to be begun."""

    def __init__(self, plan: Plan, first: int, neighbourhoods: Neighbourhoods) -> None:
        """`neighbourhoods` are told who has work."""
        self.stopping = False
        """Whether no further step is opened."""
        self._plan, self._neighbourhoods = plan, neighbourhoods
        self._next = self._unfinished = first
        """The step to be opened, and the oldest that has something left to be begun."""
        self._open: dict[int, OpenStep] = {}
        self.lanes = lanes_of(plan, self._open)
        self.lanes_on = {
            name: [lane for lane in self.lanes.values() if lane.task.executor == name] for name in plan.executors
        }

    def __contains__(self, step: int) -> bool:
        return step in self._open

    @property
    def next(self) -> int | None:
        """The step to be opened; None after the last one."""
        return None if self.stopping or self._next > self._plan.steps else self._next

    @property
    def finished(self) -> bool:
        """Whether none is open, and none will be."""
        return not self._open and self.next is None

    def is_through(self, step: int) -> bool:
        """Whether `step` is open, and nothing of it is left to be run."""
        state = self._open.get(step)
        return state is not None and not state.left

    def is_all_for(self, executor: str, lane: Lane, step: int) -> bool:
        """Whether nothing is left for an executor, as far as steps are open, but this task of this step."""
        return not any(
            each.has_left(other) and (each, other) != (lane, step)
            for each in self.lanes_on[executor]
            for other in self._open
        )

    def next_for(self, executor: str) -> int | None:
        """The oldest step that has something left for `executor`, or else the one to be opened."""
        lanes = self.lanes_on[executor]
        return next((step for step in self._open if any(lane.has_left(step) for lane in lanes)), self.next)

    def open(self) -> None:
        """Open all steps that may be."""
        while (step := self.next) is not None:
            bound = step - self._plan.max_staleness
            while self._unfinished < bound and not self._has_left(self._unfinished):
                self._unfinished += 1
            if self._unfinished < bound:
                return
            self._begin(step)
            self._next += 1

    def close(self, step: int) -> None:
        """`step` is committed."""
        del self._open[step]

    def stop_after(self, step: int) -> None:
        """Drop all that is younger than `step`."""
        self.stopping = True
        for younger in [each for each in self._open if each > step]:
            del self._open[younger]

    def promise(self, run: Run) -> None:
        """What `run` is for is being done, on workers that take up what is behind it when it is."""
        lane = self.lanes[run.task]
        self._supply(lane.readers_behind, run.step, run.shards)
        self._open[run.step].sure += lane.ends_training(run)

    def finish(self, run: Run) -> None:
        """What `run` is for is done: some of it, or the last of it."""
        if not self._counts(run):
            return
        lane, state = self.lanes[run.task], self._open[run.step]
        new = state.tasks[run.task].finish(run.shards)
        if not new:
            return
        if not state.tasks[run.task].left:
            state.left -= 1
            state.sure -= lane.ends_training(run)
            lane.leave(run.step)
        self._note_ready(lane, run.step)
        self._supply(lane.readers, run.step, new)

    def give_back(self, run: Run) -> None:
        """What `run` has not done yet is to be run again."""
        if self._counts(run):
            lane = self.lanes[run.task]
            lane.progress(run.step).give_back(run.shards)
            self._note_ready(lane, run.step)

    def begin_round(self, step: int) -> None:
        """The batch of `step` is short: what runs in rounds runs once more."""
        if step not in self._open:  # dropped by a stop
            return
        state = self._open[step]
        state.round += 1
        for name, lane in self.lanes.items():
            if lane.task.in_rounds:
                state.left += not state.tasks[name].left
                state.tasks[name] = lane.cut.begin()
                self._note_ready(lane, step)

    def _begin(self, step: int) -> None:
        lanes = [self.lanes[task.name] for task in self._plan.tasks_of(step)]
        self._open[step] = OpenStep({lane.task.name: lane.cut.begin() for lane in lanes}, left=len(lanes))
        for lane in lanes:
            lane.enter(step)
            self._note_ready(lane, step)

    def _supply(self, readers: Iterable[Lane], step: int, shards: Sequence[int]) -> None:
        for reader in readers:
            reader.progress(step).supply(shards)
            self._note_ready(reader, step)

    def _has_left(self, step: int) -> bool:
        return step in self._open and self._open[step].left > self._open[step].sure

    def _counts(self, run: Run) -> bool:
        """Whether the step of `run` was not dropped by a stop, and it is not of an earlier round."""
        return run.step in self._open and run.round == self.lanes[run.task].round_in(run.step)

    def _note_ready(self, lane: Lane, step: int) -> None:
        if self._open[step].tasks[lane.task.name].ready:
            lane.note(step)
            self._neighbourhoods.touch(lane.task.executor)
