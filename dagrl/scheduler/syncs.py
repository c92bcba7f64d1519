"""Weight versions, and the syncs that are necessary or useful. Version v is the policy after step v."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from dagrl.scheduler.commands import Restart, Sync
from dagrl.scheduler.plan import Executor, Plan, PlannedTask, Rows
from dagrl.scheduler.resources import ResourceTracker
from dagrl.scheduler.time_sharing import TimeSharing


class WeightVersions:
    """The weight versions of all executors, beginning with the step before the first."""

    def __init__(self, plan: Plan, first_step: int) -> None:
        self._max_staleness = plan.max_staleness
        self._held: dict[str, int | None] = {
            name: None if executor.weights_from else first_step - 1 for name, executor in plan.executors.items()
        }
        self._training: dict[str, tuple[int, str]] = {}
        """Executor -> step and task of an update that is running or incomplete."""
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
        self._held[follower] = version

    def promised(self, source: str) -> int:
        """The version of a trained executor after all its running commands."""
        return self._promised.get(source, self.newest(source))

    def begin_training(self, step: int, task: PlannedTask, *, ends: bool) -> None:
        """A piece of an update begins. `ends`: it is the last one."""
        self._training[task.executor] = (step, task.name)
        if ends:
            self._promised[task.executor] = step

    def finish_training(self, step: int, task: PlannedTask) -> None:
        """The last piece of an update ends."""
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


@dataclass(frozen=True, slots=True)
class SyncPolicy:
    """Reads the scheduler's state and changes nothing."""

    plan: Plan
    resources: ResourceTracker
    sharing: TimeSharing
    versions: WeightVersions
    lost: Set[str]
    """Executors without workers."""

    def lacks_weights(self, step: int, task: PlannedTask) -> bool:
        """Whether the weights that the executor holds are too old for a task."""
        held = self.versions.held(task.executor)
        return held is None or held < self.versions.wanted(step, task)

    def needed(self, step: int, task: PlannedTask) -> Sync | Restart | None:
        """The command that brings the missing weights of a task. None if it must wait."""
        follower, source = task.executor, self._source_of(task.executor)
        if self.versions.newest(source) < self.versions.wanted(step, task):
            return None
        for name in (follower, source):
            if name in self.lost:
                return Restart(step, name) if self.resources.free(name) else None
        return self._sync(step, follower, source)

    def behind_update(self, step: int, task: PlannedTask) -> Sync | None:
        """A sync of the weights that a running update computes, queued behind it, if it needs no moves."""
        follower, source = task.executor, self._source_of(task.executor)
        version = self.versions.promised(source)
        if version < self.versions.wanted(step, task) or version == self.versions.newest(source):
            return None
        sync = Sync(step, follower, source, version)
        possible = self.resources.queue_behind(source) is not None and not {follower, source} & self.lost
        return sync if possible and not self.sharing.before(sync) else None

    def worthwhile(self, step: int, follower: str) -> Sync | None:
        """A sync of weights that are newer than necessary, if it needs no moves."""
        source, held = self._source_of(follower), self.versions.held(follower)
        assert held is not None, f"{follower} lacks weights"
        sync = self._sync(step, follower, source) if held < self.versions.newest(source) else None
        return None if sync is None or self.sharing.before(sync) else sync

    def is_wanted_of(self, source: str) -> bool:
        """Whether a follower of `source` lacks its newest weights, and the sync needs no moves."""
        newest = self.versions.held(source)
        return newest is not None and any(
            executor.weights_from == source
            and self.versions.held(name) != newest
            and not self.sharing.before(Sync(0, name, source, newest))
            for name, executor in self.plan.executors.items()
        )

    def is_between_groups(self, sync: Sync) -> bool:
        return self.plan.executors[sync.follower].group != self.plan.executors[sync.source].group

    def _source_of(self, follower: str) -> str:
        source = self.plan.executors[follower].weights_from
        assert source is not None, f"{follower} takes no weights"
        return source

    def _sync(self, step: int, follower: str, source: str) -> Sync | None:
        if not self.resources.free(source) or not self.versions.may_send(source, step, follower):
            return None
        return Sync(step, follower, source, self.versions.newest(source))
