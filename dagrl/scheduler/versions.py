"""Weight versions: which one each executor holds, and which one a task needs. Version v is the policy after step v."""

from __future__ import annotations

from dagrl.scheduler.plan import Executor, Plan, PlannedTask, Rows


class WeightVersions:
    """The weight versions of all executors, beginning with the step before the first."""

    def __init__(self, plan: Plan, first_step: int) -> None:
        self._max_staleness = plan.max_staleness
        self._held: dict[str, int | None] = {
            name: None if executor.weights_from else first_step - 1 for name, executor in plan.executors.items()
        }
        self._training: dict[str, tuple[int, str]] = {}
        """Executor -> step and task of an update that is running, or has more pieces."""
        self._promised: dict[str, int] = {}
        """Executor -> its version after the last piece of an update, once that piece has begun."""

    def held(self, executor: str) -> int | None:
        """The version that `executor` holds. None before its first sync, or if the weights are lost."""
        return self._held[executor]

    def newest(self, source: str) -> int:
        """The last complete version of a trained executor."""
        version = self._held[source]
        assert version is not None, f"{source} is trained and has no weights"
        return version

    def set_held(self, follower: str, version: int | None) -> None:
        """`follower` has got other weights, or lost them."""
        self._held[follower] = version

    def promised(self, source: str) -> int:
        """The version of a trained executor after everything that runs on it."""
        return self._promised.get(source, self.newest(source))

    def begin_training(self, step: int, task: PlannedTask, *, ends: bool) -> None:
        """A piece of an update begins. `ends`: it is the last one."""
        self._training[task.executor] = (step, task.name)
        if ends:
            self._promised[task.executor] = step

    def finish_training(self, step: int, task: PlannedTask) -> None:
        """The last piece of an update has ended."""
        self._held[task.executor] = step
        del self._training[task.executor], self._promised[task.executor]

    def wanted(self, step: int, task: PlannedTask) -> int:
        """The oldest version on which a task may begin, if its executor takes weights from another one."""
        return step if task.rows is Rows.VALIDATION else max(0, step - 1 - self._max_staleness)

    def in_order(self, step: int, task: PlannedTask, executor: Executor) -> bool:
        """Whether the order of steps allows `task` on a trained executor, and no other update is running."""
        if not executor.trained or task.frozen:
            return True
        if self._training.get(executor.name, (step, task.name)) != (step, task.name):
            return False
        return self.newest(executor.name) >= (step if task.rows is Rows.VALIDATION else step - 1)

    def may_send(self, source: str, step: int, follower: str) -> bool:
        """Whether weights of `source` may go to `follower` for `step`: no update is incomplete.

        A follower that has lost its weights gets incomplete ones if the rest of the update may wait for `step`.
        """
        training = self._training.get(source)
        return training is None or (self._held[follower] is None and step <= training[0])
