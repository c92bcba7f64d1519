"""Time sharing: colocated executors take turns in their devices' memory.

- An executor that works is awake, and the other sleepers of its group are asleep.
- A sync within a group needs both ends with weights alone: neither may be awake beside the weights of the other. A sync
  between groups needs the weights of both ends, and an awake end stays awake.
- First, executors that hold too much are offloaded; then others are onloaded.

Executors that never sleep are always awake, and do not restrict others. The scheduler decides when.
"""

from __future__ import annotations

from dagrl.config.residency import Residency
from dagrl.scheduler.commands import OnEngine, Restart, Run, Save, Sleep, Sync, Wake
from dagrl.scheduler.plan import Executor, Plan

_Bounds = tuple[Residency, Residency]
"""The lowest and the highest residency of an executor."""
_OFFLOADED: _Bounds = (Residency.ASLEEP, Residency.ASLEEP)
_WEIGHTS_ALONE: _Bounds = (Residency.WEIGHTS, Residency.WEIGHTS)
_WEIGHTS_AT_LEAST: _Bounds = (Residency.WEIGHTS, Residency.AWAKE)
_AWAKE: _Bounds = (Residency.AWAKE, Residency.AWAKE)


class TimeSharing:
    """The residency of each executor, first as the start leaves it."""

    def __init__(self, plan: Plan) -> None:
        self._executors = plan.executors
        self._executor_of = {task.name: task.executor for task in plan.tasks}
        self._sleepers: dict[str | None, tuple[str, ...]] = {}
        for executor in plan.executors.values():
            if executor.sleeps:
                assert executor.group is not None, f"{executor.name} has no devices to leave"
                self._sleepers[executor.group] = (*self._sleepers.get(executor.group, ()), executor.name)
        self._residency = dict.fromkeys(plan.executors, Residency.AWAKE)
        for chain in start_chains(plan):
            self._residency |= {name: residency_after_start(plan.executors[name], chain) for name in chain}

    def residency(self, executor: str) -> Residency:
        return self._residency[executor]

    def is_shared(self, executor: str) -> bool:
        return self._executors[executor].group in self._sleepers

    def set_residency(self, executor: str, residency: Residency) -> None:
        self._residency[executor] = residency

    def before(self, command: OnEngine) -> list[Sleep] | list[Wake]:
        """The moves that `command` needs before it begins, all at once; empty if it may begin. Must be called again
        after the moves.
        """
        now, needs = self._residency, self._needs(command)
        down = [Sleep(command.step, name, most) for name, (_, most) in needs.items() if now[name] > most]
        return down or [Wake(command.step, name, least) for name, (least, _) in needs.items() if now[name] < least]

    def _needs(self, command: OnEngine) -> dict[str, _Bounds]:
        """The bounds of the sleepers' residency while `command` runs."""
        match command:
            case Run(_, task, _):
                return self._needs_of_work(self._executor_of[task])
            case Save(_, executor):
                return self._needs_of_work(executor)
            case Sync(_, follower, source, _):
                return self._needs_of_sync(follower, source)
            case Restart(_, executor):
                # A worker takes all its memory when it starts.
                sleepers = self._sleepers.get(self._executors[executor].group, ())
                return {name: _OFFLOADED for name in sleepers if name != executor}

    def _needs_of_work(self, executor: str) -> dict[str, _Bounds]:
        sleepers = self._sleepers.get(self._executors[executor].group, ())
        return {name: _AWAKE if name == executor else _OFFLOADED for name in sleepers}

    def _needs_of_sync(self, follower: str, source: str) -> dict[str, _Bounds]:
        ends = [name for name in (follower, source) if self._executors[name].sleeps]
        colocated = self._executors[follower].group == self._executors[source].group
        others = {name: _OFFLOADED for end in ends for name in self._sleepers[self._executors[end].group]}
        return others | dict.fromkeys(ends, _WEIGHTS_ALONE if colocated else _WEIGHTS_AT_LEAST)


def start_chains(plan: Plan) -> list[tuple[str, ...]]:
    """The order of starts: chains start at the same time, the executors of a chain one after the other.

    Executors that share devices form a chain. Servers measure free memory, so they come first, generators before
    judges. A source of weights comes last: its weights are needed next. CPU slots without sleepers need no order.
    """
    generating = {task.executor for task in plan.tasks if task.generates}
    sources = {executor.weights_from for executor in plan.executors.values()}

    def order(executor: Executor) -> tuple[bool, ...]:
        generates = executor.name in generating
        return not generates, not executor.are_servers, executor.trained, executor.name in sources

    chains: list[tuple[str, ...]] = []
    by_group: dict[str, list[Executor]] = {}
    for executor in plan.executors.values():
        if executor.group is None:
            chains.append((executor.name,))
        else:
            by_group.setdefault(executor.group, []).append(executor)
    for tenants in by_group.values():
        if any(tenant.sleeps or tenant.on_gpus for tenant in tenants):
            chains.append(tuple(tenant.name for tenant in sorted(tenants, key=order)))
        else:
            chains += [(tenant.name,) for tenant in tenants]
    return chains


def residency_after_start(executor: Executor, chain: tuple[str, ...]) -> Residency:
    """Contents of an executor's device memory after its start: sleepers make room for executors that start later."""
    return Residency.ASLEEP if executor.sleeps and executor.name != chain[-1] else Residency.AWAKE
