"""Groups of generators whose machines come and go (``min_nodes``).

A lost worker leaves its executor, and the others go on. New workers start while they work, on the machine that lost one
or on another that has joined the cluster, and belong to the executor from its next weight sync on, which gives them
their weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from dagrl.config.schema import GroupSpec, Pipeline
from dagrl.orchestrator.groups.worker_group import WorkerGroups
from dagrl.orchestrator.groups.worker_handle import WorkerHandle
from dagrl.scheduler.plan import Plan, WorkerId
from dagrl.workers.errors import RunError

_LOOK_EVERY_S = 5.0
_PAUSE_S = 60.0
"""Pause after workers that did not start."""


class ElasticGroups:
    """The elastic groups of a run, each with one executor."""

    def __init__(self, groups: WorkerGroups, plan: Plan, pipeline: Pipeline, note: Callable[[str], None]) -> None:
        self._groups, self._note = groups, note
        self._specs: dict[str, GroupSpec] = {}
        """Executor -> its group."""
        self._names: dict[str, str] = {}
        """Executor -> the name of its group."""
        for name, executor in plan.executors.items():
            if executor.group is not None and pipeline.groups[executor.group].is_elastic:
                self._specs[name], self._names[name] = pipeline.groups[executor.group], executor.group
        self._ready: dict[str, list[WorkerHandle]] = {}
        """Workers that have started and wait for a weight sync."""

    def spare(self, executor: str, lost: Collection[int]) -> bool:
        """Let an executor go on without these ranks, whose workers were killed. False if it needs them."""
        spec = self._specs.get(executor)
        if spec is None or not lost:
            return False
        assert spec.min_nodes is not None
        left = self._groups[executor].by_rank.keys() - set(lost)
        if len(left) < spec.min_nodes * spec.slots_per_node:
            return False
        self._groups.remove(executor, lost)
        return True

    def has_spared(self, executor: str, ranks: Collection[int]) -> bool:
        """Whether the executor goes on without these ranks."""
        return executor in self._specs and self._groups[executor].by_rank.keys().isdisjoint(ranks)

    def admit(self, executor: str) -> list[WorkerId]:
        """Let the workers that have started take part in the weight sync that begins now, and return them."""
        joining = self._ready.pop(executor, [])
        if joining:
            self._groups.add(joining)
            joined, ranks = ", ".join(str(handle.id) for handle in joining), self._groups[executor].by_rank
            self._note(f"{joined} joined: {executor} has {len(ranks)} of {self._specs[executor].ranks} ranks")
        return [handle.id for handle in joining]

    @property
    def executors(self) -> tuple[str, ...]:
        """The executors on elastic groups."""
        return tuple(self._specs)

    @property
    def missing(self) -> int:
        """Ranks of all elastic groups without a worker."""
        return sum(spec.ranks - len(self._groups[name].by_rank) for name, spec in self._specs.items())

    async def refill(self) -> None:
        """Start the missing workers whenever there is a machine for them. Never ends."""
        await asyncio.gather(*map(self._refill, self._specs))

    async def _refill(self, executor: str) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if ranks := self._startable(executor):
                try:
                    started = await self._groups.start_more(executor, ranks)
                except RunError as error:
                    self._note(
                        f"{executor} stays without {len(ranks)} of its ranks, which did not start: {error.cause}"
                    )
                    await asyncio.sleep(_PAUSE_S)
                else:
                    self._ready.setdefault(executor, []).extend(started)

    def _startable(self, executor: str) -> list[int]:
        """Missing ranks of one machine that is there."""
        spec, group, slots = self._specs[executor], self._names[executor], self._groups.slots
        there = self._groups[executor].by_rank.keys() | {handle.id.rank for handle in self._ready.get(executor, ())}
        missing = [rank for rank in range(spec.ranks) if rank not in there]
        nodes = dict.fromkeys(rank // spec.slots_per_node for rank in missing)
        node = next((node for node in nodes if slots.has(group, node)), None)
        node = slots.join(group) if nodes and node is None else node
        return [rank for rank in missing if rank // spec.slots_per_node == node]
