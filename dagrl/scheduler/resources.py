"""Who is busy with what."""

from __future__ import annotations

from dagrl.scheduler.commands import Command, Commit, Restart, Run, Save, Sleep, Sync, Wake
from dagrl.scheduler.dirty_set import Neighbourhoods
from dagrl.scheduler.plan import HOST, Plan


class Room:
    """What is under way on each executor. A group is for one of its executors at a time."""

    def __init__(self, plan: Plan, neighbourhoods: Neighbourhoods) -> None:
        """`neighbourhoods` are told who is free again."""
        self._executor_of = {task.name: task.executor for task in plan.tasks}
        self._group_of = {name: executor.group for name, executor in plan.executors.items()}
        self._hands = {name: executor.ranks if name == HOST else 1 for name, executor in plan.executors.items()}
        self._under_way: dict[str, set[Command]] = {name: set() for name in plan.executors}
        self._queues = {name for name in plan.executors if plan.queues(name)}
        self._busy_in: dict[str, int] = {group: 0 for group in self._group_of.values() if group is not None}
        """Group -> its executors that are busy."""
        self._neighbourhoods = neighbourhoods

    def workers_of(self, command: Command) -> tuple[str, ...]:
        """The executors that `command` keeps busy."""
        match command:
            case Run(_, task, _):
                return (self._executor_of[task],)
            case Sync(_, follower, source, _):
                return follower, source
            case Sleep(_, executor, _) | Wake(_, executor, _) | Restart(_, executor) | Save(_, executor):
                return (executor,)
            case Commit():
                return ()

    def under_way(self, executor: str) -> tuple[Command, ...]:
        """What `executor` is busy with."""
        return tuple(self._under_way[executor])

    def free(self, *executors: str) -> bool:
        """Whether each of these may begin something."""
        for name in executors:
            if len(self._under_way[name]) >= self._hands[name]:
                return False
            group = self._group_of[name]
            if group is not None and self._busy_in[group]:
                return False
        return True

    def ahead(self, executor: str) -> Run | None:
        """The run that `executor` is busy with, where one more may be sent to its workers behind it."""
        if executor in self._queues and len(self._under_way[executor]) == 1:
            (command,) = self._under_way[executor]
            return command if isinstance(command, Run) else None
        return None

    def weights_coming(self, executor: str) -> Sync | None:
        """The sync that alone `executor` is busy with, where a rollout may be sent to its workers behind it."""
        match self.under_way(executor):
            case [Sync(_, follower, _, _) as sync] if follower == executor and self._is_alone(executor):
                return sync
        return None

    def _is_alone(self, executor: str) -> bool:
        """Whether no other executor of its group is busy, where it is."""
        group = self._group_of[executor]
        return group is None or self._busy_in[group] == 1

    def occupy(self, command: Command) -> None:
        """`command` begins."""
        for name in self.workers_of(command):
            group, under_way = self._group_of[name], self._under_way[name]
            if group is not None and not under_way:
                self._busy_in[group] += 1
            under_way.add(command)

    def release(self, command: Command) -> None:
        """`command` is over."""
        workers = self.workers_of(command)
        for name in workers:
            group, under_way = self._group_of[name], self._under_way[name]
            assert command in under_way, f"{command} is over, but was not under way on {name}"
            under_way.remove(command)
            if group is not None and not under_way:
                self._busy_in[group] -= 1
        self._neighbourhoods.touch(*workers)
