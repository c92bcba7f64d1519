"""Carries out `Sleep` and `Wake`, and knows who holds devices: for metrics, and for what is said of a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dagrl.backends.base import Slept
from dagrl.config.residency import Residency
from dagrl.scheduler.commands import Sleep, Wake
from dagrl.scheduler.plan import Plan
from dagrl.workers.groups.worker_group import Fleet

_IN_WORDS = {Residency.ASLEEP: "asleep", Residency.WEIGHTS: "its weights alone", Residency.AWAKE: "awake"}


class Moves:
    """The executors of a run on their ways to sleep and back."""

    def __init__(self, fleet: Fleet, plan: Plan, residency: Callable[[str], Residency]) -> None:
        """`residency` of an executor, where the scheduler knows it."""
        self._fleet = fleet
        self._plan = plan
        self._residency = residency
        self._under_way: dict[str, Residency] = {}
        self._freed: dict[str, float] = {}
        """Executor -> GiB that it has given back since it last came up."""

    async def carry_out(self, move: Sleep | Wake) -> None:
        """Have all ranks of the executor go where `move` says."""
        name, to = move.executor, move.residency
        self._under_way[name] = to
        if isinstance(move, Wake):
            await self._fleet.call_all(name, "wake", to, waits_for=f"{name} to wake up to: {_IN_WORDS[to]}")
            self._freed[name] = 0.0
        else:
            ranks: list[Slept] = await self._fleet.call_all(
                name, "sleep", to, waits_for=f"{name} to give memory back down to: {_IN_WORDS[to]}"
            )
            # Ranks whose memory another one speaks for hold none of their own.
            freed = min((rank.freed_gib for rank in ranks if rank.held_gib), default=0.0)
            self._freed[name] = self._freed.get(name, 0.0) + freed
        del self._under_way[name]

    def forget(self, executor: str) -> None:
        """It has lost its workers: it is on no way any more, and comes back awake."""
        self._under_way.pop(executor, None)
        self._freed.pop(executor, None)

    def freed_gib(self, executor: str) -> float:
        """Device memory that `executor` has given back since it was last awake, on the rank that gave the least."""
        return self._freed.get(executor, 0.0)

    def who_holds_what(self, executors: Iterable[str]) -> str:
        """For messages: what each executor has in memory, in the groups of `executors` that take turns."""
        groups = {self._plan.executors[name].group for name in executors}
        sentences = []
        for group in sorted(each for each in groups if each is not None):
            tenants = [each for each in self._plan.executors.values() if each.group == group]
            if any(tenant.sleeps for tenant in tenants):
                sentences.append(f"group {group}: {', '.join(self._holding(tenant.name) for tenant in tenants)}")
        return "; ".join(sentences)

    def _holding(self, executor: str) -> str:
        now = self._residency(executor)
        if executor in self._under_way:
            return f"{executor} on its way from {_IN_WORDS[now]} to {_IN_WORDS[self._under_way[executor]]}"
        freed = self.freed_gib(executor)
        given = f" (gave {freed:.1f} GiB a GPU back)" if freed and now is not Residency.AWAKE else ""
        return f"{executor} {'has ' if now is Residency.WEIGHTS else ''}{_IN_WORDS[now]}{given}"
