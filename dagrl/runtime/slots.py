"""Where workers live: actors on the slots of their groups, machine by machine, each slot with the same GPU for all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dagrl.plan.plan import Executor, Plan
from dagrl.runtime.errors import RunError
from dagrl.runtime.profiled import python_under_nsys
from dagrl.runtime.worker import Worker
from dagrl.spec.schema import GroupSpec, Pipeline


class Slots:
    """The slots of a run's groups, reserved when the first executor comes to them."""

    def __init__(self, ray: ModuleType, plan: Plan, pipeline: Pipeline) -> None:
        self._ray = ray
        self._plan = plan
        self._pipeline = pipeline
        self._reserved: dict[str, tuple[Any, Sequence[int]]] = {}
        """Group -> its placement group, and the bundle of each slot."""

    async def place(self, executor: Executor, run_dir: Path, threads: int) -> list[Any]:
        """Create the actors of an executor, by rank, each with so many threads; they may not have started yet."""
        remote = self._ray.remote(Worker)
        if executor.group is None:
            return [remote.options(num_cpus=0).remote() for _ in range(executor.ranks)]
        placement, bundles = await self._reserve(executor.group)
        tenants = sum(other.group == executor.group for other in self._plan.executors.values())
        share = {"num_cpus": 0, "num_gpus": 1 / tenants} if executor.on_gpus else {"num_cpus": 1 / tenants}
        actors = []
        for rank in range(executor.ranks):
            python = python_under_nsys(self._pipeline, executor.engines[0], rank, run_dir)
            placed = remote.options(
                **share,
                placement_group=placement,
                placement_group_bundle_index=bundles[rank],
                max_concurrency=threads,
                runtime_env={"py_executable": python} if python else None,
            )
            actors.append(placed.remote())
        return actors

    def release(self) -> None:
        """Give all slots back."""
        from ray.util.placement_group import remove_placement_group

        for placement, _ in self._reserved.values():
            remove_placement_group(placement)
        self._reserved = {}

    async def _reserve(self, group: str) -> tuple[Any, Sequence[int]]:
        from ray.util.placement_group import placement_group, placement_group_table

        if group not in self._reserved:
            spec, bound = self._pipeline.groups[group], self._pipeline.run.start_timeout_s
            placement = placement_group([{"CPU" if spec.is_cpu else "GPU": 1}] * spec.ranks, strategy="PACK")
            bundles: Sequence[int] = range(spec.ranks)
            self._reserved[group] = placement, bundles
            if spec.nodes > 1:
                if not await asyncio.to_thread(placement.wait, bound):
                    raise RunError(
                        f"waited {bound:g} s for the slots of group {group} on {spec.nodes} machines",
                        hint="are there enough free GPUs? `ray status` says who has them",
                    )
                machines = placement_group_table(placement)["bundles_to_node_id"]
                self._reserved[group] = placement, machine_by_machine(group, spec, machines)
        return self._reserved[group]


def machine_by_machine(group: str, spec: GroupSpec, machines: Mapping[int, str]) -> list[int]:
    """Bundles in an order that keeps those of a machine together; `machines` says the machine of each.

    RunError where Ray has shared the slots out over machines in another way than the group says: ranks that talk to
    each other most would lie on different ones.
    """
    ordered = sorted(machines, key=lambda bundle: (machines[bundle], bundle))
    per_node = spec.gpus_per_node or spec.cpus_per_node
    for start in range(0, len(ordered), per_node):
        if len({machines[bundle] for bundle in ordered[start : start + per_node]}) > 1:
            counts = sorted((list(machines.values()).count(each) for each in set(machines.values())), reverse=True)
            raise RunError(
                f"group {group} is {spec.nodes} machines with {per_node} slots each, and Ray has found its slots as "
                f"{' + '.join(map(str, counts))}",
                hint="make room on whole machines, or change nodes and the slots of each",
            )
    return ordered
