"""Places workers on machines: a placement group for each GPU group, with one bundle per slot."""

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
from dagrl.scheduler.machines import MisfitError, assign_machines
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
        self._reserved: dict[str, PlacementGroup] = {}
        self._homes: dict[str, list[str]] | None = None
        """Group -> Ray node ids of its machines, once known."""

    async def place(
        self, executor: Executor, run_dir: Path, threads: int, ranks: Iterable[int]
    ) -> list[ray.actor.ActorHandle]:
        """Create the actors of these ranks. They may not have started yet."""
        # Otherwise Ray's control store keeps an event for each call, 39 KB a step, up to 100,000 of them.
        remote = ray.remote(enable_task_events=False)(Worker)
        if executor.group is None:
            # CPU workers are spread over all machines. The first one is on the driver's machine, which has the data.
            machines = machines_of(ray)
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

    async def _options_on(
        self, group: str, executor: Executor, run_dir: Path, threads: int, ranks: Iterable[int]
    ) -> list[dict[str, object]]:
        self._check_homes(group)
        placement = await self._reserve(group)
        tenants = sum(other.group == group for other in self._plan.executors.values())
        share = {"num_cpus": 0, "num_gpus": 1 / tenants} if executor.on_gpus else {"num_cpus": 1 / tenants}
        options = []
        for rank in ranks:
            python = python_of(self._pipeline, executor.engines[0], rank, run_dir)
            pinned = {"placement_group": placement, "placement_group_bundle_index": rank}
            env = {"py_executable": python} if python else None
            options.append({**share, **pinned, "max_concurrency": threads, "runtime_env": env})
        return options

    def _check_homes(self, group: str) -> None:
        """Raise WorkerLostError if a machine with slots of the group is lost, because no worker can restart there."""
        if self._homes is not None:
            there = {machine.id for machine in machines_of(ray)}
            if gone := sum(home not in there for home in self._homes[group]):
                few = "1 machine" if gone == 1 else f"{gone} machines"
                raise WorkerLostError(f"{few} of group {group} {'is' if gone == 1 else 'are'} gone")

    def release(self) -> None:
        for placement in self._reserved.values():
            remove_placement_group(placement)
        self._reserved = {}

    async def _reserve(self, group: str) -> PlacementGroup:
        """A bundle for each slot, machine by machine, so that neighbouring ranks share a machine."""
        if group not in self._reserved:
            if self._homes is None:
                self._homes = await self._find_homes()
            spec, bound = self._pipeline.groups[group], self._pipeline.run.start_timeout_s
            per_machine = spec.gpus_per_node or spec.cpus_per_node
            pinned = [{_NODE_LABEL: machine} for machine in self._homes[group] for _ in range(per_machine)]
            bundles = [{"CPU" if spec.is_cpu else "GPU": 1}] * spec.ranks
            placement = placement_group(bundles, strategy="PACK", bundle_label_selector=pinned)
            self._reserved[group] = placement
            deadline = time.monotonic() + bound
            # In slices: Ctrl-C does not wait for the thread, and Ray does not shut down under it.
            while not await asyncio.to_thread(placement.wait, _SLICE_S):
                if time.monotonic() > deadline:
                    raise RunError(
                        f"waited {bound:g} s for the slots of group {group}",
                        hint="are there enough free CPUs and GPUs? `ray status` says who has them",
                    )
        return self._reserved[group]

    async def _find_homes(self) -> dict[str, list[str]]:
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
                return {group: [machines[index].id for index in chosen] for group, chosen in assigned.items()}
