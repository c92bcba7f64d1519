"""Places workers on machines: a placement group for each GPU group, with one bundle per slot.

An elastic group has one for each machine, because machines come and go.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dagrl.config.schema import Pipeline
from dagrl.orchestrator.cluster.ray_cluster import machines_of
from dagrl.scheduler.machines import Machine, MisfitError, assign_machines
from dagrl.scheduler.plan import Executor, Plan
from dagrl.workers.errors import RunError, WorkerLostError
from dagrl.workers.profiled import python_of
from dagrl.workers.worker import Worker

_NODE_LABEL = "ray.io/node-id"
_PAUSE_S = 0.1
_SLICE_S = 1.0


class SlotAllocator:
    """Creates the actors of workers. The slots of a group are reserved with its first executor."""

    def __init__(self, plan: Plan, pipeline: Pipeline) -> None:
        self._plan, self._pipeline = plan, pipeline
        self._reserved: dict[tuple[str, int], PlacementGroup] = {}
        """Group and its first machine there, which is 0 unless it is elastic -> its slots."""
        self._homes: dict[str, list[str | None]] | None = None
        """Group -> Ray node ids of its machines, once known; None for a machine that an elastic group does not have."""

    async def ranks(self, executor: Executor) -> list[int]:
        """The ranks of an executor that have a machine."""
        if executor.group is None or not self._pipeline.groups[executor.group].is_elastic:
            return [*range(executor.ranks)]
        per_node = self._pipeline.groups[executor.group].slots_per_node
        homes = (await self._known_homes())[executor.group]
        return [rank for rank in range(executor.ranks) if homes[rank // per_node] is not None]

    def join(self, group: str) -> int | None:
        """Give an elastic group another machine, if one has room; returns its number in the group."""
        assert self._homes is not None, "no worker has been placed"
        homes, spec = self._homes[group], self._pipeline.groups[group]
        free = [
            machine.id for machine in machines_of(ray, free=True) if machine.slots(spec.is_cpu) >= spec.slots_per_node
        ]
        if None not in homes or not free:
            return None
        homes[node := homes.index(None)] = free[0]
        return node

    def has(self, group: str, node: int) -> bool:
        """Whether an elastic group has this machine. One that is no longer in the cluster leaves the group."""
        assert self._homes is not None, "no worker has been placed"
        home = self._homes[group][node]
        if home is not None and home not in {machine.id for machine in machines_of(ray)}:
            self._homes[group][node] = home = None
            if placement := self._reserved.pop((group, node), None):
                remove_placement_group(placement)
        return home is not None

    async def place(
        self, executor: Executor, run_dir: Path, threads: int, ranks: Iterable[int]
    ) -> list[ray.actor.ActorHandle]:
        """Create the actors of these ranks. They may not have started yet."""
        # Otherwise Ray's control store keeps an event for each call, 39 KB a step, up to 100,000 of them.
        remote = ray.remote(enable_task_events=False)(Worker)
        if executor.group is None:
            # CPU workers are spread over the machines. The first one is on the driver's machine, which has the data.
            machines = await self._lasting()
            homes = [NodeAffinitySchedulingStrategy(machine.id, soft=False) for machine in machines]
            options = [{"num_cpus": 0, "scheduling_strategy": homes[rank % len(homes)]} for rank in ranks]
        else:
            options = await self._options_on(executor.group, executor, run_dir, threads, ranks)
        actors = []
        for actor_options in options:
            actors.append(remote.options(**actor_options).remote())
            # There may be thousands: the loop handles Ctrl-C in between.
            await asyncio.sleep(0)
        return actors

    async def _lasting(self) -> list[Machine]:
        """The driver's machine, and others that the run needs to its end, as it needs its CPU workers."""
        machines = machines_of(ray)
        groups = self._pipeline.groups
        if not any(group.is_elastic for group in groups.values()):
            return machines
        known = await self._known_homes()
        needed = {home for name, homes in known.items() if not groups[name].is_elastic for home in homes}
        return [machine for index, machine in enumerate(machines) if not index or machine.id in needed]

    async def _options_on(
        self, group: str, executor: Executor, run_dir: Path, threads: int, ranks: Iterable[int]
    ) -> list[dict[str, object]]:
        self._check_homes(group)
        spec = self._pipeline.groups[group]
        tenants = sum(other.group == group for other in self._plan.executors.values())
        share = {"num_cpus": 0, "num_gpus": 1 / tenants} if executor.on_gpus else {"num_cpus": 1 / tenants}
        options = []
        for rank in ranks:
            python = python_of(self._pipeline, executor.engines[0], rank, run_dir)
            first = rank // spec.slots_per_node if spec.is_elastic else 0
            placement = await self._reserve(group, first)
            bundle = rank - first * spec.slots_per_node
            pinned = {"placement_group": placement, "placement_group_bundle_index": bundle}
            env = {"py_executable": python} if python else None
            options.append({**share, **pinned, "max_concurrency": threads, "runtime_env": env})
        return options

    def _check_homes(self, group: str) -> None:
        """Raise WorkerLostError if a machine with slots of the group is lost, because no worker can restart there."""
        # An elastic group places only on machines that are there.
        if self._homes is not None and not self._pipeline.groups[group].is_elastic:
            there = {machine.id for machine in machines_of(ray)}
            if gone := sum(home not in there for home in self._homes[group]):
                few = "1 machine" if gone == 1 else f"{gone} machines"
                raise WorkerLostError(f"{few} of group {group} {'is' if gone == 1 else 'are'} gone")

    def release(self) -> None:
        for placement in self._reserved.values():
            remove_placement_group(placement)
        self._reserved = {}

    async def _reserve(self, group: str, first: int) -> PlacementGroup:
        """A bundle for each slot, machine by machine, so that neighbouring ranks share a machine."""
        if (group, first) not in self._reserved:
            spec, bound = self._pipeline.groups[group], self._pipeline.run.start_timeout_s
            homes = (await self._known_homes())[group]
            homes = [homes[first]] if spec.is_elastic else homes
            pinned = [{_NODE_LABEL: str(machine)} for machine in homes for _ in range(spec.slots_per_node)]
            bundles = [{"CPU" if spec.is_cpu else "GPU": 1}] * len(pinned)
            placement = placement_group(bundles, strategy="PACK", bundle_label_selector=pinned)
            self._reserved[group, first] = placement
            deadline = time.monotonic() + bound
            # In slices: Ctrl-C does not wait for the thread, and Ray does not shut down under it.
            while not await asyncio.to_thread(placement.wait, _SLICE_S):
                if time.monotonic() > deadline:
                    raise RunError(
                        f"waited {bound:g} s for the slots of group {group}",
                        hint="are there enough free CPUs and GPUs? `ray status` says who has them",
                    )
        return self._reserved[group, first]

    async def _known_homes(self) -> dict[str, list[str | None]]:
        if self._homes is None:
            self._homes = await self._find_homes()
        return self._homes

    async def _find_homes(self) -> dict[str, list[str | None]]:
        """Ray node ids of each group's machines. Waits for resources that another job holds: it may be ending."""
        bound = self._pipeline.run.start_timeout_s
        deadline = time.monotonic() + bound
        while True:
            machines = machines_of(ray, free=True)
            groups = {name: group for name, group in self._pipeline.groups.items() if name in self._plan.groups}
            try:
                assigned = assign_machines(groups, machines)
            except MisfitError as error:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"waited {bound:g} s for free slots: {error}",
                        hint="others use the rest of the cluster (see `ray status`); wait for them, or ask for less",
                    ) from error
                await asyncio.sleep(_PAUSE_S)
            else:
                homes = {group: [machines[index].id for index in chosen] for group, chosen in assigned.items()}
                return {group: [*ids, *[None] * (groups[group].nodes - len(ids))] for group, ids in homes.items()}
