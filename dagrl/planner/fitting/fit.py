"""Which engines are on the GPUs of each group, what they take of them by turns, and what is over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dagrl.backends.families.registry import model_shape
from dagrl.backends.families.shape import ModelShape
from dagrl.config.schema import Pipeline
from dagrl.graph.dag import Graph
from dagrl.planner.hardware import DEFAULT_GPU, Gpu, gpu_of_group
from dagrl.planner.memory.engines import engine_memory
from dagrl.planner.memory.estimate import GIB, EngineMemory
from dagrl.scheduler.placement import make_plan
from dagrl.scheduler.plan import Executor, Plan


@dataclass(frozen=True, slots=True)
class Tenant:
    """An executor on a group's GPUs, and what it takes of the fullest."""

    executor: Executor
    memory: EngineMemory

    @property
    def name(self) -> str:
        """Its engine's name."""
        return self.executor.name

    @property
    def at_rest(self) -> int:
        """What it holds while another works: little if it sleeps, else all that it ever took."""
        return self.memory.asleep if self.executor.sleeps else self.memory.peak


@dataclass(frozen=True, slots=True)
class Moment:
    """What a GPU holds at one time."""

    what: str
    """``actor: update``."""
    engine: str
    """Whose turn it is."""
    parts: dict[str, int]
    """Engine -> bytes."""

    @property
    def total(self) -> int:
        """Of all engines."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Problem:
    """An engine that does not find room."""

    group: str
    engine: str
    over: int
    """Bytes that are missing on the fullest GPU."""
    text: str
    """The whole of it, in a sentence."""


@dataclass(frozen=True, slots=True)
class GroupFit:
    """One group."""

    name: str
    gpu: Gpu | None
    """None for a group of CPU slots, whose memory nobody here knows."""
    nodes: int
    slots_per_node: int
    tenants: tuple[Tenant, ...]

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Each engine's turn, and each sync between two of the group's engines."""
        return tuple(self._moments())

    @property
    def fullest(self) -> Moment | None:
        """The moment with the least room; None in a group without engines."""
        return max(self.moments, key=lambda moment: moment.total, default=None)

    @property
    def host_per_node(self) -> int:
        """Bytes of host memory on each machine that wait for its devices."""
        return self.slots_per_node * sum(tenant.memory.host for tenant in self.tenants)

    def problems(self) -> Iterator[Problem]:
        """What does not fit."""
        if self.gpu is None:
            return
        full = self.fullest
        if full is not None and full.total > self.gpu.memory_bytes:
            over = full.total - self.gpu.memory_bytes
            others = [f"{name} {gib(size)}" for name, size in full.parts.items() if name != full.engine]
            beside = f", beside {' and '.join(others)}" if others else ""
            text = (
                f"group {self.name}: {full.engine} needs {gib(full.parts[full.engine])} GiB of each {self.gpu.name} "
                f"({full.what.partition(': ')[2]}){beside}: {gib(over)} GiB more than its {self.gpu.memory_gib:g}"
            )
            yield Problem(self.name, full.engine, over, text)
        for tenant in self.tenants:
            needs = tenant.memory.needs
            if needs is not None and needs > tenant.memory.peak:
                over = needs - tenant.memory.peak
                text = (
                    f"group {self.name}: {tenant.name} needs {gib(needs)} GiB for weights, a cache for its longest "
                    f"samples and graphs, and takes {gib(tenant.memory.peak)} by its mem_fraction_static: "
                    f"{gib(over)} GiB too few"
                )
                yield Problem(self.name, tenant.name, over, text)

    @property
    def over(self) -> int:
        """Bytes that are missing, summed over all moments and servers: less is nearer to what fits, also where several
        moments are equally full. 0 where all fits.
        """
        if self.gpu is None:
            return 0
        missing = [moment.total - self.gpu.memory_bytes for moment in self.moments]
        needs = [(tenant.memory.needs or 0) - tenant.memory.peak for tenant in self.tenants]
        return sum(each for each in (*missing, *needs) if each > 0)

    def _moments(self) -> Iterator[Moment]:
        rest = {tenant.name: tenant.at_rest for tenant in self.tenants}
        for tenant in self.tenants:
            what = f"{tenant.name}: {tenant.memory.moment}"
            yield Moment(what, tenant.name, {**rest, tenant.name: tenant.memory.peak})
            source = next((each for each in self.tenants if each.name == tenant.executor.weights_from), None)
            if source is not None:
                both = {
                    each.name: each.memory.weights_alone if each.executor.sleeps else each.memory.peak
                    for each in (tenant, source)
                }
                yield Moment(f"{tenant.name}: sync from {source.name}", tenant.name, {**rest, **both})


@dataclass(frozen=True, slots=True)
class Fit:
    """All groups of a pipeline."""

    shape: ModelShape
    plan: Plan
    groups: tuple[GroupFit, ...]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What does not fit, the worst first."""
        found = (problem for group in self.groups for problem in group.problems())
        return tuple(sorted(found, key=lambda problem: -problem.over))


def fit(pipeline: Pipeline, graph: Graph, *, gpu: str = DEFAULT_GPU, shape: ModelShape | None = None) -> Fit:
    """What the engines of a checked pipeline take; `gpu` is what groups have that do not say.

    ValueError where the model's shape is not known or does not go with a layout.
    """
    shape = shape or model_shape(pipeline.model)
    plan = make_plan(pipeline, graph)
    groups = []
    for name, group in pipeline.groups.items():
        hardware = gpu_of_group(pipeline, name, gpu)
        tenants = tuple(
            Tenant(executor, engine_memory(pipeline, plan, executor.name, shape, hardware))
            for executor in plan.executors.values()
            if executor.group == name
        )
        slots = group.gpus_per_node or group.cpus_per_node
        groups.append(GroupFit(name, hardware, group.nodes, slots, tenants))
    return Fit(shape, plan, tuple(groups))


def gib(nbytes: float) -> str:
    """GiB with a digit behind the point."""
    return f"{nbytes / GIB:.1f}"
