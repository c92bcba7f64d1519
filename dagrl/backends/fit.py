"""The engines on the GPUs of each group: memory in turns, misfits, and ``sleep: auto``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from dagrl.backends.families.registry import model_shape
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.planning.changes import replaced
from dagrl.backends.planning.gpus import DEFAULT_GPU, Gpu, gpu_of_group
from dagrl.backends.planning.memory import GIB, EngineMemory
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.backends.registry import backend_of
from dagrl.config.schema import Pipeline
from dagrl.graph.dag import Graph
from dagrl.scheduler.placement import make_plan
from dagrl.scheduler.plan import Executor, Plan

ROOM = 0.92
"""Share of a GPU that engines may fill together; the rest is for memory outside the estimates."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """An engine on the GPUs of a group, and its memory on the fullest of them."""

    executor: Executor
    memory: EngineMemory

    @property
    def name(self) -> str:
        return self.executor.name


@dataclass(frozen=True, slots=True)
class Moment:
    """Contents of a GPU at one time."""

    engine: str
    work: str
    """``update``."""
    parts: dict[str, int]
    """Engine -> bytes."""

    @property
    def what(self) -> str:
        """``actor: update``."""
        return f"{self.engine}: {self.work}"

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class FitProblem:
    """An engine that does not fit."""

    group: str
    engine: str
    over: int
    """Bytes that are missing on the fullest GPU."""
    text: str
    """The engine, its GPU and the missing bytes in a sentence."""


@dataclass(frozen=True)
class GroupFit:
    """One group."""

    name: str
    gpu: Gpu | None
    """None for a group of CPU slots, whose memory is unknown."""
    nodes: int
    slots_per_node: int
    tenants: tuple[Tenant, ...]

    @property
    def fullest(self) -> Moment | None:
        """The moment with the least memory left; None in a group without engines."""
        return max(self.moments, key=lambda moment: moment.total, default=None)

    @cached_property
    def at_rest(self) -> dict[str, int]:
        """Bytes that each engine holds while another one works: little if it sleeps, and without the memory of its
        tasks if it stays awake beside sleepers.
        """
        some_sleep = any(tenant.executor.sleeps for tenant in self.tenants)
        held = {}
        for tenant in self.tenants:
            memory = tenant.memory
            awake = memory.peak if memory.at_rest is None or not some_sleep else memory.at_rest
            held[tenant.name] = memory.asleep if tenant.executor.sleeps else awake
        return held

    @property
    def host_per_node(self) -> int:
        """Bytes of host memory that the engines take on each machine."""
        return self.slots_per_node * sum(tenant.memory.host for tenant in self.tenants)

    def problems(self) -> Iterator[FitProblem]:
        if self.gpu is None:
            return
        full = self.fullest
        if full is not None and full.total > self.gpu.memory_bytes:
            over = full.total - self.gpu.memory_bytes
            others = [f"{name} {gib(size)}" for name, size in full.parts.items() if name != full.engine]
            beside = f", beside {' and '.join(others)}" if others else ""
            text = (
                f"{full.engine} needs {gib(full.parts[full.engine])} GiB of each {self.gpu.name} "
                f"({full.work}){beside}: {gib(over)} GiB more than its {self.gpu.memory_gib:g}"
            )
            yield FitProblem(self.name, full.engine, over, text)
        for tenant in self.tenants:
            needs = tenant.memory.needs
            if needs is not None and needs > tenant.memory.peak:
                over = needs - tenant.memory.peak
                text = (
                    f"{tenant.name} needs {gib(needs)} GiB for weights, a cache for its longest "
                    f"samples and graphs, and takes {gib(tenant.memory.peak)} by its {tenant.memory.filled_by}: "
                    f"{gib(over)} GiB too few"
                )
                yield FitProblem(self.name, tenant.name, over, text)

    @property
    def over(self) -> int:
        """Missing bytes, summed over all moments and engines, so that less is nearer to a fit; 0 if all fits."""
        if self.gpu is None:
            return 0
        missing = [moment.total - self.gpu.memory_bytes for moment in self.moments]
        needs = [(tenant.memory.needs or 0) - tenant.memory.peak for tenant in self.tenants]
        return sum(size for size in (*missing, *needs) if size > 0)

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """Each engine at work, and each weight sync between two engines of the group."""
        rest, moments = self.at_rest, []
        for tenant in self.tenants:
            moments.append(Moment(tenant.name, tenant.memory.moment, {**rest, tenant.name: tenant.memory.peak}))
            source = next((end for end in self.tenants if end.name == tenant.executor.weights_from), None)
            if source is not None:
                both = {
                    end.name: end.memory.weights_alone if end.executor.sleeps else rest[end.name]
                    for end in (tenant, source)
                }
                moments.append(Moment(tenant.name, f"sync from {source.name}", {**rest, **both}))
        return tuple(moments)


@dataclass(frozen=True, slots=True)
class Fit:
    """All groups of a pipeline."""

    pipeline: Pipeline
    shape: ModelShape
    plan: Plan
    groups: tuple[GroupFit, ...]

    @property
    def problems(self) -> tuple[FitProblem, ...]:
        problems = (problem for group in self.groups for problem in group.problems())
        return tuple(sorted(problems, key=lambda problem: -problem.over))


@dataclass(frozen=True, slots=True)
class Placement:
    """A pipeline whose engines have their ranks, with ``sleep: auto`` decided."""

    pipeline: Pipeline
    plan: Plan
    fit: Fit | None
    """None if the file names no GPUs, or the model's shape is unknown."""


def place(pipeline: Pipeline, graph: Graph) -> Placement:
    """Plan a checked pipeline. Engines stay awake together if they are known to fit on the GPUs that the file names."""
    plan = make_plan(pipeline, graph)
    if not any(group.gpu for group in pipeline.groups.values()):
        return Placement(pipeline, plan, None)
    try:
        estimate = with_sleep_decided(fit(pipeline, plan))
    except ValueError:
        return Placement(pipeline, plan, None)
    return Placement(estimate.pipeline, estimate.plan, estimate)


def fit(pipeline: Pipeline, plan: Plan, *, gpu: str = DEFAULT_GPU, shape: ModelShape | None = None) -> Fit:
    """Estimate the memory of a plan's engines; `gpu` applies to groups that name none.

    ValueError if the model's shape is unknown or does not suit a layout.
    """
    shape = shape or model_shape(pipeline.model)
    groups = tuple(group_fit(pipeline, plan, name, gpu, shape) for name in pipeline.groups)
    return Fit(pipeline, shape, plan, groups)


def with_sleep_decided(estimate: Fit) -> Fit:
    """Set ``sleep: false`` for engines with ``sleep: auto``: for all of a group if they fit together, otherwise for the
    engines without ``weights_from`` if these fit.

    Only these copy their contents to the host and back; others get new weights after a sleep anyway. Groups without a
    named GPU keep ``auto``, and take turns.
    """
    for group in estimate.groups:
        if estimate.pipeline.groups[group.name].gpu is None:
            continue
        undecided = [
            tenant.executor
            for tenant in group.tenants
            if estimate.pipeline.engines[tenant.name].sleep == "auto" and estimate.pipeline.neighbours(tenant.name)
        ]
        copied = [executor for executor in undecided if executor.weights_from is None]
        awake = (
            _awake(estimate, group, [executor.name for executor in chosen]) for chosen in (undecided, copied) if chosen
        )
        estimate = next((candidate for candidate in awake if _is_roomy(candidate, estimate, group.name)), estimate)
    return estimate


def engine_memory(pipeline: Pipeline, plan: Plan, name: str, shape: ModelShape, gpu: Gpu | None) -> EngineMemory:
    """Estimate one engine of a plan; `shape` describes the pipeline's model."""
    return backend_of(pipeline.engines[name]).memory(PlannedEngine(pipeline, plan, name, shape, gpu))


def group_fit(pipeline: Pipeline, plan: Plan, name: str, gpu: str, shape: ModelShape) -> GroupFit:
    group, device = pipeline.groups[name], gpu_of_group(pipeline, name, gpu)
    tenants = tuple(
        Tenant(executor, engine_memory(pipeline, plan, executor.name, shape, device))
        for executor in plan.executors.values()
        if executor.group == name
    )
    return GroupFit(name, device, group.nodes, group.slots_per_node, tenants)


def _awake(estimate: Fit, group: GroupFit, engines: list[str]) -> Fit:
    """Return the fit with these engines of a group awake; the other groups stay as they are."""
    sections = {name: estimate.pipeline.engines[name].model_copy(update={"sleep": False}) for name in engines}
    executors = {name: replace(estimate.plan.executors[name], sleeps=False) for name in engines}
    pipeline = replaced(estimate.pipeline, sections)
    plan = replace(estimate.plan, executors={**estimate.plan.executors, **executors})
    assert group.gpu is not None, "engines stay awake only on GPUs that are known"
    fitted = group_fit(pipeline, plan, group.name, group.gpu.name, estimate.shape)
    groups = tuple(fitted if other.name == group.name else other for other in estimate.groups)
    return Fit(pipeline, estimate.shape, plan, groups)


def _is_roomy(estimate: Fit, before: Fit, name: str) -> bool:
    """Whether a group fits at each moment with a margin, or is no fuller than before."""
    group, earlier = (next(group for group in fit.groups if group.name == name) for fit in (estimate, before))
    assert group.gpu is not None
    margin, was = ROOM * group.gpu.memory_bytes, {moment.what: moment.total for moment in earlier.moments}
    return not list(group.problems()) and all(
        moment.total <= max(margin, was.get(moment.what, 0)) for moment in group.moments
    )


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f}"
