"""Which weights go to whom: what a generator cannot begin without, and what is worth the time."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from dagrl.scheduler.commands import Restart, Sync
from dagrl.scheduler.plan import Plan, PlannedTask
from dagrl.scheduler.resources import Room
from dagrl.scheduler.time_sharing import Turns
from dagrl.scheduler.versions import Versions


@dataclass(frozen=True, slots=True)
class Syncs:
    """Looks at what the scheduler knows, and changes nothing."""

    plan: Plan
    room: Room
    turns: Turns
    versions: Versions
    lost: Set[str]
    """Executors without workers."""

    def lacks_weights(self, step: int, task: PlannedTask) -> bool:
        """Whether a task may not begin on what its executor, which follows another one, holds."""
        held = self.versions.held(task.executor)
        return held is None or held < self.versions.wanted(step, task)

    def needed(self, step: int, task: PlannedTask) -> Sync | Restart | None:
        """What brings a task the weights that it lacks, or None where that must wait."""
        follower, source = task.executor, self._source_of(task.executor)
        if self.versions.newest(source) < self.versions.wanted(step, task):
            return None
        for name in (follower, source):
            if name in self.lost:
                return Restart(step, name) if self.room.free(name) else None
        return self._sync(step, follower, source)

    def behind_update(self, step: int, task: PlannedTask) -> Sync | None:
        """What brings a task the weights that an update, which is under way, will have made, as soon as that is over.

        Only where nobody has to move for it.
        """
        follower, source = task.executor, self._source_of(task.executor)
        version = self.versions.promised(source)
        if version < self.versions.wanted(step, task) or version == self.versions.newest(source):
            return None
        sync = Sync(step, follower, source, version)
        alone = self.room.ahead(source) is not None and not {follower, source} & self.lost
        return sync if alone and not self.turns.before(sync) else None

    def worthwhile(self, step: int, follower: str) -> Sync | None:
        """Weights newer than what `follower` holds, though that would do, if nobody has to move for them."""
        source, held = self._source_of(follower), self.versions.held(follower)
        assert held is not None, f"{follower} lacks weights"
        sync = self._sync(step, follower, source) if held < self.versions.newest(source) else None
        return None if sync is None or self.turns.before(sync) else sync

    def is_wanted_of(self, source: str) -> bool:
        """Whether somebody who follows `source` lacks its newest weights, and nobody has to move for them."""
        newest = self.versions.held(source)
        return newest is not None and any(
            executor.weights_from == source
            and self.versions.held(name) != newest
            and not self.turns.before(Sync(0, name, source, newest))
            for name, executor in self.plan.executors.items()
        )

    def is_between_groups(self, sync: Sync) -> bool:
        """Whether follower and source have devices of their own each."""
        follower, source = (self.plan.executors[name] for name in (sync.follower, sync.source))
        return follower.group != source.group

    def _source_of(self, follower: str) -> str:
        source = self.plan.executors[follower].weights_from
        assert source is not None, f"{follower} follows nobody"
        return source

    def _sync(self, step: int, follower: str, source: str) -> Sync | None:
        if not self.room.free(source) or not self.versions.may_leave(source, step, follower):
            return None
        return Sync(step, follower, source, self.versions.newest(source))
