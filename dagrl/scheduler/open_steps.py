"""The open steps: the next one, the progress of each, and the times of saves and commits."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Sequence

from dagrl.scheduler.commands import Commit, Run, Save
from dagrl.scheduler.plan import Plan
from dagrl.scheduler.resources import DirtySet
from dagrl.scheduler.syncs import WeightVersions
from dagrl.scheduler.task_state import OpenStep, TaskState, make_task_states


class OpenSteps:
    """A step opens once all work of the step ``max_staleness + 1`` before it has begun."""

    def __init__(self, plan: Plan, first: int, dirty: DirtySet) -> None:
        """Executors with new work are marked as `dirty`."""
        self.stopping = False
        """Whether no further step opens."""
        self.last = plan.steps
        self._plan, self._dirty = plan, dirty
        self._next = self._unfinished = first
        """The step to open, and the oldest step with work that has not begun."""
        self._open: dict[int, OpenStep] = {}
        self.tasks = make_task_states(plan, self._open)
        self.tasks_on = {
            name: [state for state in self.tasks.values() if state.task.executor == name] for name in plan.executors
        }

    def __contains__(self, step: int) -> bool:
        return step in self._open

    @property
    def next(self) -> int | None:
        """The step to open; None after the last one."""
        return None if self.stopping or self._next > self.last else self._next

    @property
    def finished(self) -> bool:
        return not self._open and self.next is None

    def opened(self) -> ItemsView[int, OpenStep]:
        """The open steps, oldest first."""
        return self._open.items()

    def is_done(self, step: int) -> bool:
        """Whether `step` is open, and all its tasks are done."""
        opened = self._open.get(step)
        return opened is not None and not opened.left

    def is_all_for(self, executor: str, state: TaskState, step: int) -> bool:
        """Whether this task of this step is an executor's only remaining work in the open steps."""
        return not any(
            own.has_left(other) and (own, other) != (state, step)
            for own in self.tasks_on[executor]
            for other in self._open
        )

    def next_for(self, executor: str) -> int | None:
        """The oldest step with work left for `executor`, or else the step to open."""
        states = self.tasks_on[executor]
        return next((step for step in self._open if any(state.has_left(step) for state in states)), self.next)

    def open(self) -> None:
        while (step := self.next) is not None:
            bound = step - self._plan.max_staleness
            while self._unfinished < bound and not self._has_left(self._unfinished):
                self._unfinished += 1
            if self._unfinished < bound:
                return
            self._begin(step)
            self._next += 1

    def close(self, step: int) -> None:
        del self._open[step]

    def stop_after(self, step: int) -> None:
        self.stopping = True
        self._drop_after(step)

    def end_with(self, step: int) -> None:
        """Make `step` the last one, and drop all steps after it, which have not begun."""
        self.last = min(self.last, step)
        self._drop_after(step)

    def _drop_after(self, step: int) -> None:
        for later in [later for later in self._open if later > step]:
            del self._open[later]

    def begin_run(self, run: Run) -> None:
        """`run` begins: tasks may be queued after it on the same workers."""
        state = self.tasks[run.task]
        state.progress(run.step).start()
        self._supply(state.queued_readers, run.step, run.shards)
        self._open[run.step].ending += state.ends_training(run)

    def finish(self, run: Run) -> None:
        """The shards of `run` are done: all of them, or one of a rollout that continues."""
        if not self._counts(run):
            return
        state, opened = self.tasks[run.task], self._open[run.step]
        new = opened.tasks[run.task].finish(run.shards)
        if not new:
            return
        if not opened.tasks[run.task].left:
            opened.left -= 1
            opened.ending -= state.ends_training(run)
            state.leave(run.step)
        self._note_ready(state, run.step)
        self._supply(state.readers, run.step, new)

    def give_back(self, run: Run) -> None:
        """The shards of `run` that are not done must run again."""
        if self._counts(run):
            state = self.tasks[run.task]
            state.progress(run.step).give_back(run.shards)
            self._note_ready(state, run.step)

    def begin_round(self, step: int) -> None:
        """The batch of `step` is short: all tasks in rounds run again."""
        if step not in self._open:  # dropped by a stop
            return
        opened = self._open[step]
        opened.round += 1
        for name, state in self.tasks.items():
            if state.task.in_rounds:
                opened.left += not opened.tasks[name].left
                opened.tasks[name] = state.order.begin()
                self._note_ready(state, step)

    def _begin(self, step: int) -> None:
        states = [self.tasks[task.name] for task in self._plan.tasks_of(step)]
        self._open[step] = OpenStep({state.task.name: state.order.begin() for state in states}, left=len(states))
        for state in states:
            state.enter(step)
            self._note_ready(state, step)

    def _supply(self, readers: Iterable[TaskState], step: int, shards: Sequence[int]) -> None:
        for reader in readers:
            reader.progress(step).supply(shards)
            self._note_ready(reader, step)

    def _has_left(self, step: int) -> bool:
        return step in self._open and self._open[step].left > self._open[step].ending

    def _counts(self, run: Run) -> bool:
        """Whether the step of `run` is open, and in the same round."""
        return run.step in self._open and run.round == self.tasks[run.task].round_in(run.step)

    def _note_ready(self, state: TaskState, step: int) -> None:
        if self._open[step].tasks[state.task.name].ready:
            state.mark_ready(step)
            self._dirty.mark(state.task.executor)


class CommitPolicy:
    """Tracks the saves and commits that are due. The last step is saved, at the end of the plan or of a stop."""

    def __init__(self, plan: Plan, first: int, steps: OpenSteps, versions: WeightVersions) -> None:
        self.next = first
        """The oldest step that was not committed."""
        self._plan, self._steps, self._versions = plan, steps, versions
        self._trained = [name for name, executor in plan.executors.items() if executor.trained]
        self._begun: set[Save] = set()
        self._saved: set[Save] = set()

    def due_save(self, executor: str) -> Save | None:
        """The save that must run before a trained executor continues."""
        if executor not in self._trained:
            return None
        save = Save(self._versions.newest(executor), executor)
        return save if save.step >= self.next and self._is_saved(save.step) and save not in self._begun else None

    def begin(self, save: Save) -> None:
        self._begun.add(save)

    def finish(self, save: Save) -> None:
        self._saved.add(save)

    def due(self) -> Iterator[Commit]:
        while self._steps.is_done(self.next):
            saves = self._is_saved(self.next)
            if saves and not self._saved.issuperset(Save(self.next, name) for name in self._trained):
                return
            yield Commit(self.next, saves)
            self.next += 1
            self._begun = {save for save in self._begun if save.step >= self.next}
            self._saved = {save for save in self._saved if save.step >= self.next}

    def _is_saved(self, step: int) -> bool:
        if step == 0 or self._plan.only_validates:
            return False
        return self._plan.saves(step) or self._steps.stopping or step == self._steps.last
