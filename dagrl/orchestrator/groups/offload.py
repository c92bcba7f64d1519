"""Executes `Sleep` and `Wake`, and describes the device memory of engines for metrics and error messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dagrl.config.residency import Residency
from dagrl.orchestrator.groups.worker_group import WorkerGroups
from dagrl.scheduler.commands import Sleep, Wake
from dagrl.scheduler.plan import Plan
from dagrl.workers.worker import Worker

_IN_WORDS = {Residency.ASLEEP: "asleep", Residency.WEIGHTS: "its weights alone", Residency.AWAKE: "awake"}


class Offloader:
    """Offloads and onloads the executors of a run."""

    def __init__(self, groups: WorkerGroups, plan: Plan, residency: Callable[[str], Residency]) -> None:
        self._groups, self._plan, self._residency = groups, plan, residency
        self._moving_to: dict[str, Residency] = {}
        self._freed: dict[str, float] = {}
        """Executor -> GiB freed since it was last onloaded."""

    async def move(self, command: Sleep | Wake) -> None:
        name, to = command.executor, command.residency
        self._moving_to[name] = to
        if isinstance(command, Wake):
            await self._groups[name].call_all(f"{name} to wake up to: {_IN_WORDS[to]}", Worker.wake, to)
            self._freed[name] = 0.0
        else:
            what = f"{name} to give memory back down to: {_IN_WORDS[to]}"
            ranks = await self._groups[name].call_all(what, Worker.sleep, to)
            # Ranks without memory belong to a server that another rank reports.
            freed = min((rank.freed_gib for rank in ranks if rank.held_gib), default=0.0)
            self._freed[name] = self._freed.get(name, 0.0) + freed
        del self._moving_to[name]

    def forget(self, executor: str) -> None:
        """The executor has lost its workers: it is no longer moving, and restarts awake."""
        self._moving_to.pop(executor, None)
        self._freed.pop(executor, None)

    def freed_gib(self, executor: str) -> float:
        """Device memory that the executor has freed since it was last awake, on the rank that freed the least."""
        return self._freed.get(executor, 0.0)

    def describe(self, executors: Iterable[str]) -> str:
        """For error messages: the memory of each engine in the time-shared groups of `executors`."""
        groups = {self._plan.executors[name].group for name in executors}
        sentences = []
        for group in sorted(name for name in groups if name is not None):
            tenants = [executor for executor in self._plan.executors.values() if executor.group == group]
            if any(tenant.sleeps for tenant in tenants):
                sentences.append(f"group {group}: {', '.join(self._describe(tenant.name) for tenant in tenants)}")
        return "; ".join(sentences)

    def _describe(self, executor: str) -> str:
        now = self._residency(executor)
        if executor in self._moving_to:
            return f"{executor} moving from {_IN_WORDS[now]} to {_IN_WORDS[self._moving_to[executor]]}"
        freed = self.freed_gib(executor)
        given = f" (freed {freed:.1f} GiB a GPU)" if freed and now is not Residency.AWAKE else ""
        return f"{executor} {'has ' if now is Residency.WEIGHTS else ''}{_IN_WORDS[now]}{given}"
