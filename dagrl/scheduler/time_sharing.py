"""Who of a group is in its devices' memory: what has to move before an executor may work, and who starts before whom.

Executors of one group that sleep take turns:

- Whoever works is awake, and the other sleepers of its group are asleep.
- A sync within a group finds those of the two that sleep with their weights alone: never is one of them whole beside
  the weights of the other. A sync between groups needs the weights of both ends, and takes an end that is awake as it
  is.
- On the way there, whoever holds too much goes down first; only then does anybody come up.

Executors that do not sleep are always awake, and in nobody's way. The scheduler says when.
"""

from __future__ import annotations

from dataclasses import dataclass

from dagrl.config.residency import Residency
from dagrl.scheduler.commands import OnEngine, Restart, Run, Save, Sync
from dagrl.scheduler.plan import Executor, Plan

_Bounds = tuple[Residency, Residency]
"""The least and the most that an executor may hold."""
_GONE: _Bounds = (Residency.ASLEEP, Residency.ASLEEP)
_WEIGHTS_ALONE: _Bounds = (Residency.WEIGHTS, Residency.WEIGHTS)
_WEIGHTS_AT_LEAST: _Bounds = (Residency.WEIGHTS, Residency.AWAKE)
_WHOLE: _Bounds = (Residency.AWAKE, Residency.AWAKE)


@dataclass(frozen=True, slots=True)
class Move:
    """One executor's way to another residency."""

    executor: str
    to: Residency
    down: bool
    """Whether it gives memory back."""


class Turns:
    """How much of each executor is on its devices, beginning with what a start leaves there."""

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
        """What `executor` has in its devices' memory."""
        return self._residency[executor]

    def takes_turns(self, executor: str) -> bool:
        """Whether somebody of the group of `executor` sleeps."""
        return self._executors[executor].group in self._sleepers

    def arrive(self, executor: str, residency: Residency) -> None:
        """A move of `executor` is over."""
        self._residency[executor] = residency

    def before(self, command: OnEngine) -> list[Move]:
        """What has to move, all at once, before `command` may begin; nothing where it may. Ask again afterwards."""
        match command:
            case Run(_, task, _):
                return self._before_work(self._executor_of[task])
            case Save(_, executor):
                return self._before_work(executor)
            case Sync(_, follower, source, _):
                return self._before_sync(follower, source)
            case Restart(_, executor):
                return self._before_restart(executor)

    def _before_work(self, executor: str) -> list[Move]:
        sleepers = self._sleepers.get(self._executors[executor].group)
        if not sleepers:
            return []
        return self._moves({name: _WHOLE if name == executor else _GONE for name in sleepers})

    def _before_restart(self, executor: str) -> list[Move]:
        """Lost workers take all that they need to work when they start."""
        sleepers = self._sleepers.get(self._executors[executor].group, ())
        return self._moves({name: _GONE for name in sleepers if name != executor})

    def _before_sync(self, follower: str, source: str) -> list[Move]:
        ends = [name for name in (follower, source) if self._executors[name].sleeps]
        if not ends:
            return []
        together = self._executors[follower].group == self._executors[source].group
        needs = {name: _GONE for end in ends for name in self._sleepers[self._executors[end].group]}
        needs |= dict.fromkeys(ends, _WEIGHTS_ALONE if together else _WEIGHTS_AT_LEAST)
        return self._moves(needs)

    def _moves(self, needs: dict[str, _Bounds]) -> list[Move]:
        down = [Move(name, most, down=True) for name, (_, most) in needs.items() if self._residency[name] > most]
        if down:
            return down
        return [Move(name, least, down=False) for name, (least, _) in needs.items() if self._residency[name] < least]


def start_chains(plan: Plan) -> list[tuple[str, ...]]:
    """Who starts when: the executors of a chain one after the other, the chains at the same time.

    Those that share devices are a chain: servers measure how much memory is free, so they come first, those that
    generate before those that judge, and whoever is followed last, for its weights are what is needed next. CPU slots
    without sleepers have no such order.
    """
    generating = {task.executor for task in plan.tasks if task.generates}
    followed = {executor.weights_from for executor in plan.executors.values()}

    def place(executor: Executor) -> tuple[bool, ...]:
        generates = executor.name in generating
        return not generates, not executor.measures_memory, executor.trained, executor.name in followed

    chains: list[tuple[str, ...]] = []
    by_group: dict[str, list[Executor]] = {}
    for executor in plan.executors.values():
        if executor.group is None:
            chains.append((executor.name,))
        else:
            by_group.setdefault(executor.group, []).append(executor)
    for tenants in by_group.values():
        if any(tenant.sleeps or tenant.on_gpus for tenant in tenants):
            chains.append(tuple(tenant.name for tenant in sorted(tenants, key=place)))
        else:
            chains += [(tenant.name,) for tenant in tenants]
    return chains


def residency_after_start(executor: Executor, chain: tuple[str, ...]) -> Residency:
    """What an executor has in memory once its chain has started: a sleeper makes room for whoever comes after it."""
    return Residency.ASLEEP if executor.sleeps and executor.name != chain[-1] else Residency.AWAKE
