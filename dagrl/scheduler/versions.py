"""Which version of its weights each executor holds, and what may begin on it.

Version v is the policy after step v.
"""

from __future__ import annotations

from dagrl.scheduler.plan import Executor, Plan, PlannedTask, Rows


class Versions:
    """The weights of all executors, beginning with those of the step before the first."""

    def __init__(self, plan: Plan, first_step: int) -> None:
        self._max_staleness = plan.max_staleness
        self._held: dict[str, int | None] = {
            name: None if executor.weights_from else first_step - 1 for name, executor in plan.executors.items()
        }
        self._training: dict[str, tuple[int, str]] = {}
        """Executor -> step and task of an update that has begun and is not over."""
        self._promised: dict[str, int] = {}
        """Executor -> the version that it will hold when the last piece of an update, which has begun, is over."""

    def held(self, executor: str) -> int | None:
        """Version of the weights that `executor` holds; None before its first sync, and where they are gone."""
        return self._held[executor]

    def newest(self, source: str) -> int:
        """The last whole version of an executor that is followed, which holds weights from the start."""
        version = self._held[source]
        assert version is not None, f"{source} is followed and has no weights"
        return version

    def take(self, follower: str, version: int | None) -> None:
        """`follower` has got other weights, or lost them."""
        self._held[follower] = version

    def promised(self, source: str) -> int:
        """The version that an executor that is followed holds when it is through with what it has begun."""
        return self._promised.get(source, self.newest(source))

    def begin_training(self, step: int, task: PlannedTask, *, ends: bool) -> None:
        """A piece of an update begins, which `ends` with it or goes on."""
        self._training[task.executor] = (step, task.name)
        if ends:
            self._promised[task.executor] = step

    def finish_training(self, step: int, task: PlannedTask) -> None:
        """The last piece of an update is over."""
        self._held[task.executor] = step
        del self._training[task.executor], self._promised[task.executor]

    def wanted(self, step: int, task: PlannedTask) -> int:
        """The oldest version that a task may begin on whose executor follows another."""
        return step if task.rows is Rows.VALIDATION else max(0, step - 1 - self._max_staleness)

    def in_order(self, step: int, task: PlannedTask, executor: Executor) -> bool:
        """Whether the order of the steps allows `task` on weights that move, and nobody is moving them."""
        if not executor.trained or task.frozen:
            return True
        if self._training.get(executor.name, (step, task.name)) != (step, task.name):
            return False
        return self.newest(executor.name) >= (step if task.rows is Rows.VALIDATION else step - 1)

    def may_leave(self, source: str, step: int, follower: str) -> bool:
        """Whether weights of `source` may go to `follower` for `step`: they are whole, or there will be none before it.

        The rest of a step that is being trained may wait for who has lost its weights: the whole ones would be later.
        """
        training = self._training.get(source)
        return training is None or (self._held[follower] is None and step <= training[0])
