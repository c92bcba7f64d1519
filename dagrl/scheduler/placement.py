"""Makes the plan of a checked pipeline and its graph: engines become executors, nodes become tasks."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

from dagrl.config.capability import Capability
from dagrl.config.coordinates import Coordinates
from dagrl.config.schema import (
    AdvantageNode,
    BufferNode,
    PackingNode,
    Pipeline,
    RolloutNode,
    Scope,
    TrainingNode,
    UpdateNode,
    ValuesNode,
)
from dagrl.config.schema.rounds import expected_rounds
from dagrl.graph.dag import Graph, GraphNode
from dagrl.graph.updates import update_pieces
from dagrl.scheduler.plan import HOST, Executor, Plan, PlannedTask, Rows

_VALIDATION_PREFIX = "val/"


def make_plan(pipeline: Pipeline, graph: Graph) -> Plan:
    """The plan of a checked pipeline, without the nodes that the graph skips."""
    graph, alone = graph.working, pipeline.run.only_validates
    tasks = [
        *(() if alone else _tasks(graph.training, pipeline, Rows.TRAIN)),
        *(_tasks(graph.validation, pipeline, Rows.VALIDATION) if pipeline.run.validates else ()),
    ]
    return Plan(
        executors=_executors(pipeline, graph, _used(tasks, pipeline) if alone else None),
        tasks=tuple(tasks),
        samples_per_prompt=pipeline.rows_per_prompt(),
        val_samples_per_prompt=pipeline.rows_per_prompt(validation=True),
        shards=pipeline.schedule.shards_per_step,
        steps=0 if alone else pipeline.run.steps,
        max_staleness=pipeline.schedule.max_staleness,
        in_flight=pipeline.schedule.in_flight_weight_update,
        save_every=pipeline.run.save_every,
        validate_every=pipeline.run.validate_every,
        validate_first=pipeline.run.validate_first,
        only_validates=alone,
        expected_rounds=expected_rounds(pipeline),
    )


def _executors(pipeline: Pipeline, graph: Graph, only: Set[str] | None) -> dict[str, Executor]:
    """All executors; with `only`, the executors of these engines, none of which is trained."""
    trained = {node.spec.engine for node in graph.nodes.values() if node.contract.needs is Capability.TRAIN}  # type: ignore[union-attr]
    host = tuple(Coordinates(0, 0, rank, 0, primary=True) for rank in range(pipeline.run.host_workers))
    executors = {HOST: Executor(HOST, None, host)}
    for name, engine in pipeline.engines.items():
        # An engine without a group is a copy on the ranks of another engine, or belongs to another part of the
        # pipeline.
        if engine.group is None or (only is not None and name not in only):
            continue
        group = pipeline.groups[engine.group]
        copies = (copy for copy, spec in pipeline.engines.items() if spec.frozen_copy_of == name)
        executors[name] = Executor(
            name,
            engine.group,
            tuple(engine.layout(group)),
            (name, *(copy for copy in copies if only is None or copy in only)),
            weights_from=engine.weights_from,
            trained=name in trained and only is None,
            restored=name in trained,
            on_gpus=not group.is_cpu,
            sleeps=pipeline.sleeps(name),
            are_servers=engine.replicas_are_servers,
        )
    return executors


def _used(tasks: Iterable[PlannedTask], pipeline: Pipeline) -> Set[str]:
    """The engines of some tasks, with the engines whose ranks or weights they use."""
    used = {name for task in tasks for name in (task.engine, task.executor) if name in pipeline.engines}
    return used | {source for name in used if (source := pipeline.engines[name].weights_from)}


def _tasks(graph: Graph, pipeline: Pipeline, rows: Rows) -> Iterable[PlannedTask]:
    read = {wire for node in graph.nodes.values() for wire in node.inputs.values()}
    for node in graph.nodes.values():
        wanted = {wire.column for wire in read if wire.node == node.name}
        task = _task(node, pipeline, rows, wanted, graph.sampled_by(node.name))
        yield replace(task, in_rounds=node.name in graph.in_rounds, selects=node.name == graph.filter)


def _is_kept(node: GraphNode, pipeline: Pipeline, rows: Rows) -> bool:
    """Whether unread columns are kept: they return in a later step, or are recorded."""
    if rows is not Rows.TRAIN:
        return False
    recorded = pipeline.run.recorded
    carried = isinstance(node.spec, RolloutNode) and node.spec.partial_rollout
    return carried or (recorded is not None and node.name in recorded.nodes)


def _metric_prefix(node: GraphNode, pipeline: Pipeline) -> str:
    """Prefix of a node's metrics, which distinguishes several nodes of one kind."""
    alike = [name for name, other in pipeline.nodes.items() if type(other) is type(node.spec)]
    named = isinstance(node.spec, TrainingNode | ValuesNode | RolloutNode) and node.name != (
        pipeline.leading_rollout if isinstance(node.spec, RolloutNode) else alike[0]
    )
    return f"{node.name}/" if named else ""


def _waits_for_all(node: GraphNode, engine: str | None, sampled_by: str | None, pipeline: Pipeline) -> bool:
    """Whether an engine takes turns with the generator, so that it cannot begin before the last response.

    A pass then takes the whole batch. With shards there would be more packs, some of them half empty.
    """
    if not isinstance(node.spec, PackingNode) or engine is None or sampled_by is None:
        return False
    return pipeline.rollouts[sampled_by].engine in pipeline.neighbours(engine)


def _task(node: GraphNode, pipeline: Pipeline, rows: Rows, wanted: set[str], sampled_by: str | None) -> PlannedTask:
    prefix = _VALIDATION_PREFIX if rows is Rows.VALIDATION else ""
    engine = getattr(node.spec, "engine", None)
    spec = pipeline.engines[engine] if engine else None
    guest_of = spec.frozen_copy_of if spec else None
    host = pipeline.engines[guest_of] if guest_of else spec
    averaged = spec is not None and spec.moving_average is not None
    generates = node.contract.needs is Capability.GENERATE
    return PlannedTask(
        name=prefix + node.name,
        node=node.name,
        op=node.spec.op if node.spec is not None else node.name,
        executor=guest_of or engine or HOST,
        scope=Scope.BATCH if _waits_for_all(node, guest_of or engine, sampled_by, pipeline) else node.contract.scope,
        rows=rows,
        engine=engine,
        inputs={column: (prefix + wire.node, wire.column) for column, wire in node.inputs.items()},
        # Unread columns are not stored, unless a partial response continues from them, or they are recorded.
        outputs={
            mine: column for mine, column in node.outputs.items() if column in wanted or _is_kept(node, pipeline, rows)
        },
        streams=generates,
        trains=node.contract.needs is Capability.TRAIN,
        generates=generates,
        frozen=guest_of is not None and not averaged,
        averaged=averaged,
        pieces=update_pieces(pipeline, node.spec) if isinstance(node.spec, UpdateNode) else (),
        sampled_by=sampled_by,
        replays=isinstance(node.spec, BufferNode),
        in_order=isinstance(node.spec, AdvantageNode) and node.spec.estimator == "rae" and rows is Rows.TRAIN,
        whole_groups=node.contract.whole_groups or (host is not None and host.packing.whole_groups),
        metric_prefix=_metric_prefix(node, pipeline),
    )
