"""Decides on weight syncs: which ones a task needs, and which ones are worth the time."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from dagrl.scheduler.commands import Restart, Sync
from dagrl.scheduler.plan import Plan, PlannedTask
from dagrl.scheduler.resources import ResourceTracker
from dagrl.scheduler.time_sharing import TimeSharing
from dagrl.scheduler.versions import WeightVersions


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
        """The command that gives a task the weights that it lacks. None if that must wait."""
        follower, source = task.executor, self._source_of(task.executor)
        if self.versions.newest(source) < self.versions.wanted(step, task):
            return None
        for name in (follower, source):
            if name in self.lost:
                return Restart(step, name) if self.resources.free(name) else None
        return self._sync(step, follower, source)

    def behind_update(self, step: int, task: PlannedTask) -> Sync | None:
        """A sync of the weights that a running update makes, queued behind it. Only if nothing has to move for it."""
        follower, source = task.executor, self._source_of(task.executor)
        version = self.versions.promised(source)
        if version < self.versions.wanted(step, task) or version == self.versions.newest(source):
            return None
        sync = Sync(step, follower, source, version)
        possible = self.resources.queue_behind(source) is not None and not {follower, source} & self.lost
        return sync if possible and not self.sharing.before(sync) else None

    def worthwhile(self, step: int, follower: str) -> Sync | None:
        """A sync of weights that are newer than necessary, if nothing has to move for it."""
        source, held = self._source_of(follower), self.versions.held(follower)
        assert held is not None, f"{follower} lacks weights"
        sync = self._sync(step, follower, source) if held < self.versions.newest(source) else None
        return None if sync is None or self.sharing.before(sync) else sync

    def is_wanted_of(self, source: str) -> bool:
        """Whether a follower of `source` lacks its newest weights, and nothing has to move for the sync."""
        newest = self.versions.held(source)
        return newest is not None and any(
            executor.weights_from == source
            and self.versions.held(name) != newest
            and not self.sharing.before(Sync(0, name, source, newest))
            for name, executor in self.plan.executors.items()
        )

    def is_between_groups(self, sync: Sync) -> bool:
        """Whether follower and source are on different devices."""
        return self.plan.executors[sync.follower].group != self.plan.executors[sync.source].group

    def _source_of(self, follower: str) -> str:
        source = self.plan.executors[follower].weights_from
        assert source is not None, f"{follower} takes no weights"
        return source

    def _sync(self, step: int, follower: str, source: str) -> Sync | None:
        if not self.resources.free(source) or not self.versions.may_send(source, step, follower):
            return None
        return Sync(step, follower, source, self.versions.newest(source))
