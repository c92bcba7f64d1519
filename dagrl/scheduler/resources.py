"""Tracks busy executors, and executors whose state has changed."""

from __future__ import annotations

from dagrl.scheduler.commands import Command, Commit, Restart, Run, Save, Sleep, Sync, Wake
from dagrl.scheduler.plan import HOST, Plan


class DirtySet:
    """The executors that may be able to begin a command.

    Executors that share devices or weights form a set: a change of one may unlock another one.
    """

    def __init__(self, plan: Plan) -> None:
        """All executors are dirty at first."""
        connected = {name: {name} for name in plan.executors}
        first_of: dict[str | None, str] = {}
        for name, executor in plan.executors.items():
            neighbour = None if executor.group is None else first_of.setdefault(executor.group, name)
            for other in filter(None, (neighbour, executor.weights_from)):
                union = connected[name] | connected[other]
                connected |= dict.fromkeys(union, union)
        self._sets = list(
            dict.fromkeys(tuple(filter(members.__contains__, plan.executors)) for members in connected.values())
        )
        self._set_of = {name: index for index, names in enumerate(self._sets) for name in names}
        self._dirty = set(self._set_of.values())

    def mark(self, *executors: str) -> None:
        """These executors are free, or have work or other weights."""
        for name in executors:
            self._dirty.add(self._set_of[name])

    def take(self) -> list[str]:
        """The dirty executors, which are clean afterwards."""
        names = [name for index in sorted(self._dirty) for name in self._sets[index]]
        self._dirty.clear()
        return names


class ResourceTracker:
    """The commands that run on each executor. One executor of a group is busy at a time."""

    def __init__(self, plan: Plan, dirty: DirtySet) -> None:
        """Executors that become free are marked as `dirty`."""
        self._executor_of = {task.name: task.executor for task in plan.tasks}
        self._group_of = {name: executor.group for name, executor in plan.executors.items()}
        self._capacity = {name: executor.ranks if name == HOST else 1 for name, executor in plan.executors.items()}
        self._running: dict[str, set[Command]] = {name: set() for name in plan.executors}
        self._queues = {name for name in plan.executors if plan.queues(name)}
        self._busy_in: dict[str, int] = {group: 0 for group in self._group_of.values() if group is not None}
        """Group -> number of busy executors."""
        self._dirty = dirty

    def workers_of(self, command: Command) -> tuple[str, ...]:
        """The executors that `command` occupies."""
        match command:
            case Run(_, task, _):
                return (self._executor_of[task],)
            case Sync(_, follower, source, _):
                return follower, source
            case Sleep(_, executor, _) | Wake(_, executor, _) | Restart(_, executor) | Save(_, executor):
                return (executor,)
            case Commit():
                return ()

    def running(self, executor: str) -> tuple[Command, ...]:
        return tuple(self._running[executor])

    def free(self, *executors: str) -> bool:
        """Whether each of these executors may begin a command."""
        for name in executors:
            if len(self._running[name]) >= self._capacity[name]:
                return False
            group = self._group_of[name]
            if group is not None and self._busy_in[group]:
                return False
        return True

    def queue_behind(self, executor: str) -> Run | None:
        """The run on `executor`, if one more may be queued behind it."""
        if executor in self._queues and len(self._running[executor]) == 1:
            (command,) = self._running[executor]
            return command if isinstance(command, Run) else None
        return None

    def incoming_sync(self, executor: str) -> Sync | None:
        """The sync to `executor`, if a rollout may be queued behind it because nothing else runs in its group."""
        match self.running(executor):
            case [Sync(_, follower, _, _) as sync] if follower == executor:
                group = self._group_of[executor]
                return sync if group is None or self._busy_in[group] == 1 else None
        return None

    def occupy(self, command: Command) -> None:
        for name in self.workers_of(command):
            group, running = self._group_of[name], self._running[name]
            if group is not None and not running:
                self._busy_in[group] += 1
            running.add(command)

    def release(self, command: Command) -> None:
        workers = self.workers_of(command)
        for name in workers:
            group, running = self._group_of[name], self._running[name]
            running.remove(command)
            if group is not None and not running:
                self._busy_in[group] -= 1
        self._dirty.mark(*workers)
