"""Changes of a pipeline that may make its steps shorter, and their effect on the measured times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dagrl.backends.families.registry import model_shape
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.fit import fit, with_sleep_decided
from dagrl.backends.planning.changes import Edit
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.backends.registry import backend_of
from dagrl.config.schema import JudgeNode, PackingNode, Pipeline, RewardNode, UpdateNode
from dagrl.graph.dag import Graph
from dagrl.graph.updates import hindrance
from dagrl.planner.changes import changed
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.planner.cost.lengths import Assumed
from dagrl.scheduler.commands import Run
from dagrl.scheduler.placement import make_plan
from dagrl.scheduler.plan import HOST, Plan

_OVER_SAMPLING = 1.25
_MODEL_IS_OFF, _MODEL_IS_OFF_ON_CPU = 0.25, 1.0
"""Share of a change by which the cost model may be wrong; on CPU slots it is accurate only to orders of magnitude."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Factor to the seconds of a task: expected, at best and at worst."""

    task: str
    expected: float
    best: float
    worst: float


@dataclass(frozen=True, slots=True)
class Change:
    """A change, as overrides of the pipeline file."""

    overrides: tuple[str, ...]
    what: str
    scales: tuple[Scale, ...] = ()
    """Changes of the seconds of tasks, which the simulation cannot compute."""
    hint: str = ""
    """The key, if it has no single value."""
    needs_cores: bool = False
    """Whether more processes of one machine would compute at the same time. On CPU slots they may share cores, and gain
    nothing."""


@dataclass(frozen=True, slots=True)
class Straggling:
    """A rollout's waits for its last responses."""

    tail: float
    """Share of the rollout's seconds in which only the last shard ran."""
    thin: float
    """Share after the mean response has ended: 1 - mean / max of the responses' tokens."""


def changes(pipeline: Pipeline, graph: Graph, plan: Plan, straggling: dict[str, Straggling]) -> Iterator[Change]:
    """Changes that the pipeline allows, helpful or not. `straggling`: by rollout."""
    schedule = pipeline.schedule
    on_cpu = any(group.is_cpu for group in pipeline.groups.values())
    apart = {executor.group for executor in plan.executors.values() if executor.trained} != {
        executor.group for name, executor in plan.executors.items() if plan.generates(name)
    }
    if apart:
        yield Change(
            (f"schedule.max_staleness={schedule.max_staleness + 1}",),
            f"generate {schedule.max_staleness + 1} ahead; samples are as many versions old",
            needs_cores=on_cpu,
        )
    updates = {name: node for name, node in pipeline.nodes.items() if isinstance(node, UpdateNode)}
    several = any(node.optimizer_steps(pipeline.data.prompts_per_step) > 1 for node in updates.values())
    free = not any(hindrance(pipeline, name, node, graph) for name, node in updates.items())
    if not schedule.stream_update and several and free:
        what = "train on mini-batches before the last response is complete"
        yield Change(("schedule.stream_update=true",), what, needs_cores=on_cpu)
    workers = 2 * pipeline.run.host_workers
    what = "twice the processes for nodes without engine"
    yield Change((f"run.host_workers={workers}",), what, needs_cores=on_cpu)
    for name, node in pipeline.nodes.items():
        if isinstance(node, RewardNode | JudgeNode) and plan.task(name).executor == HOST:
            yield Change((), f"`{name}` twice as fast", (Scale(name, 0.5, 0.5, 0.5),), hint=f"nodes.{name}")
    for name, node in pipeline.rollouts.items():
        waits = straggling.get(name, Straggling(0.0, 0.0))
        yield from _more_generators(pipeline, plan, name, waits)
        if waits.tail > 0 and not node.over_sampling_batch_size:
            begun = math.ceil(_OVER_SAMPLING * pipeline.data.prompts_per_step)
            bulk = 1 - waits.tail
            scale = Scale(name, bulk * (1 + _OVER_SAMPLING) / 2, bulk, bulk * _OVER_SAMPLING)
            yield Change(
                (f"nodes.{name}.over_sampling_batch_size={begun}",),
                "abort the slowest prompts; biases training toward short responses",
                (scale,),
            )


def _more_generators(pipeline: Pipeline, plan: Plan, name: str, waits: Straggling) -> Iterator[Change]:
    """Twice the ranks of a group that only generates. Its last responses take as long as before."""
    executor = plan.executors[plan.task(name).executor]
    group = executor.group
    if group is None or any(other.trained for other in plan.executors.values() if other.group == group):
        return
    spec = pipeline.groups[group]
    key = "cpus_per_node" if spec.is_cpu else "gpus_per_node"
    count = spec.cpus_per_node if spec.is_cpu else spec.gpus_per_node
    halved = [(1 + share) / 2 for share in (waits.tail, 0.0, max(waits.tail, waits.thin))]
    yield Change(
        (f"groups.{group}.{key}={2 * count}",), "twice the generators", (Scale(name, *halved),), needs_cores=spec.is_cpu
    )


def changes_by_size(pipeline: Pipeline, graph: Graph, lengths: Assumed) -> Iterator[Change]:
    """Changes that need the sizes of model and GPUs; empty if either is unknown."""
    try:
        shape = model_shape(pipeline.model)
    except ValueError:
        return
    if shape is None or any(not group.is_cpu and not group.gpu for group in pipeline.groups.values()):
        return
    known = _Known(pipeline, graph, make_plan(pipeline, graph), shape, lengths)
    yield from known.awake()
    yield from known.savings()
    yield from known.micro_batches()


@dataclass(frozen=True, slots=True)
class _Known:
    """A pipeline for which the cost model has all sizes."""

    pipeline: Pipeline
    graph: Graph
    plan: Plan
    shape: ModelShape
    lengths: Assumed

    def awake(self) -> Iterator[Change]:
        """Keep engines that take turns on their GPUs, if all of them fit."""
        engines = self.pipeline.engines
        decided = with_sleep_decided(fit(self.pipeline, self.plan, shape=self.shape)).pipeline.engines
        stay = [name for name, engine in decided.items() if engine.sleep != engines[name].sleep]
        if stay:
            overrides = tuple(f"engines.{name}.sleep=false" for name in stay)
            yield Change(overrides, "the GPUs have room for all engines at once, by the cost model")

    def savings(self) -> Iterator[Change]:
        what = "what rows begin with is computed once for all of them, by the cost model"
        for name, executor in self.plan.executors.items():
            if executor.group is None:
                continue
            engine = PlannedEngine[Any](self.pipeline, self.plan, name, self.shape, None)
            tasks = [task for task, _ in self._packing if self.plan.task(task).executor == name]
            for change in backend_of(engine.spec).savings(engine):
                yield from self._modelled(change, what, tasks)

    def micro_batches(self) -> Iterator[Change]:
        for task, node in self._packing:
            for wanted in (2 * node.tokens_per_micro_batch, node.tokens_per_micro_batch // 2):
                change = Edit({("nodes", task, "tokens_per_micro_batch"): wanted})
                yield from self._modelled(change, "another micro-batch, by the cost model", [task])

    @property
    def _packing(self) -> Iterator[tuple[str, PackingNode]]:
        for task in self.plan.tasks:
            node = self.pipeline.packing_nodes.get(task.name)
            if node is not None:
                yield task.name, node

    def _modelled(self, change: Edit, what: str, tasks: Sequence[str]) -> Iterator[Change]:
        """The change, if the GPUs have room for it; the cost model gives its effect on `tasks`."""
        other = changed(self.pipeline, change)
        plan = make_plan(other, self.graph)
        if fit(other, plan, shape=self.shape).problems:
            return
        before = PipelineCosts(self.pipeline, self.plan, self.shape, assumed=self.lengths)
        after = PipelineCosts(other, plan, self.shape, assumed=self.lengths)
        on_cpu = any(group.is_cpu for group in self.pipeline.groups.values())
        scales = []
        for task in tasks:
            run = Run(1, task, tuple(range(self.plan.shards)))
            factor = after.seconds(run) / before.seconds(run)
            off = (_MODEL_IS_OFF_ON_CPU if on_cpu else _MODEL_IS_OFF) * abs(1 - factor)
            scales.append(Scale(task, factor, factor - off, factor + off))
        yield Change(tuple(change.overrides()), what, tuple(scales))
