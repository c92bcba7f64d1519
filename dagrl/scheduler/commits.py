"""The end of a step: what is saved of it, and when it counts."""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.scheduler.commands import Commit, Save
from dagrl.scheduler.open_steps import OpenSteps
from dagrl.scheduler.plan import Plan
from dagrl.scheduler.versions import Versions


class Commits:
    """Which saves and commits are due. The last step is saved, be it the last of the plan or before a stop."""

    def __init__(self, plan: Plan, first: int, steps: OpenSteps, versions: Versions) -> None:
        self.next = first
        """The oldest step whose commit was not issued."""
        self._plan, self._steps, self._versions = plan, steps, versions
        self._trained = [name for name, executor in plan.executors.items() if executor.trained]
        self._begun: set[Save] = set()
        self._saved: set[Save] = set()

    def due_save(self, executor: str) -> Save | None:
        """Of an executor that is trained: the save for which it must stay as it is."""
        if executor not in self._trained:
            return None
        save = Save(self._versions.newest(executor), executor)
        return save if save.step >= self.next and self._is_saved(save.step) and save not in self._begun else None

    def begin(self, save: Save) -> None:
        """`save` is under way."""
        self._begun.add(save)

    def finish(self, save: Save) -> None:
        """`save` is over."""
        self._saved.add(save)

    def due(self) -> Iterator[Commit]:
        """Commits of the steps that are through, with their saves."""
        while self._steps.is_through(self.next):
            saves = self._is_saved(self.next)
            if saves and not self._saved.issuperset(Save(self.next, name) for name in self._trained):
                return
            yield Commit(self.next, saves)
            self.next += 1
            # Nobody asks for those of older steps any more.
            self._begun = {save for save in self._begun if save.step >= self.next}
            self._saved = {save for save in self._saved if save.step >= self.next}

    def _is_saved(self, step: int) -> bool:
        return step > 0 and (self._plan.saves(step) or self._steps.stopping)
