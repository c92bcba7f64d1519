"""From a checked pipeline and its graph to a plan: engines to executors, nodes to tasks."""

from __future__ import annotations

from collections.abc import Iterable

from dagrl.plan.coordinates import Coordinates, coordinates
from dagrl.plan.plan import HOST, Executor, Plan, PlannedTask, Rows
from dagrl.spec.graph import Graph, GraphNode
from dagrl.spec.ops import Capability
from dagrl.spec.schema import MegatronEngineSpec, Pipeline, RolloutNode, SglangEngineSpec
from dagrl.spec.sglang_layout import server_slots

_VALIDATION_PREFIX = "val/"


def make_plan(pipeline: Pipeline, graph: Graph) -> Plan:
    """The plan of a pipeline that has passed its checks, without the nodes that the graph skips."""
    graph = graph.working
    rollout = next(node for node in pipeline.nodes.values() if isinstance(node, RolloutNode))
    validates = pipeline.run.validate_first or pipeline.run.validate_every is not None
    tasks = [
        *_tasks(graph, pipeline, Rows.TRAIN),
        *(_tasks(graph.validation, pipeline, Rows.VALIDATION) if validates else ()),
    ]
    return Plan(
        executors=_executors(pipeline, graph),
        tasks=tuple(tasks),
        samples_per_prompt=rollout.n,
        shards=pipeline.schedule.shards_per_step,
        steps=pipeline.run.steps,
        max_staleness=pipeline.schedule.max_staleness,
        save_every=pipeline.run.save_every,
        validate_every=pipeline.run.validate_every,
        validate_first=pipeline.run.validate_first,
    )


def _executors(pipeline: Pipeline, graph: Graph) -> dict[str, Executor]:
    trained = {node.spec.engine for node in graph.nodes.values() if node.contract.needs is Capability.TRAIN}  # type: ignore[union-attr]
    host = tuple(Coordinates(0, 0, rank, 0, primary=True) for rank in range(pipeline.run.host_workers))
    executors = {HOST: Executor(HOST, None, host)}
    for name, engine in pipeline.engines.items():
        if isinstance(engine, MegatronEngineSpec):
            if engine.shares:
                continue
            assert engine.group is not None
            guests = [
                guest
                for guest, spec in pipeline.engines.items()
                if isinstance(spec, MegatronEngineSpec) and spec.shares == name
            ]
            places = coordinates(engine.parallel, pipeline.groups[engine.group].ranks)
            executors[name] = Executor(name, engine.group, tuple(places), (name, *guests), trained=name in trained)
        elif isinstance(engine, SglangEngineSpec):
            slots = server_slots(engine, pipeline.groups[engine.group])
            # Servers are the replicas; how each splits the model over its slots is SGLang's own affair.
            places = [Coordinates(slot.place, 0, slot.server, 0, primary=slot.leads) for slot in slots]
            executors[name] = Executor(name, engine.group, tuple(places), (name,), follows=engine.follows)
        else:
            replicas = range(pipeline.groups[engine.group].ranks)
            places = [Coordinates(0, 0, rank, 0, primary=True) for rank in replicas]
            executors[name] = Executor(name, engine.group, tuple(places), (name,), follows=engine.follows)
    return executors


def _tasks(graph: Graph, pipeline: Pipeline, rows: Rows) -> Iterable[PlannedTask]:
    read = {wire for node in graph.nodes.values() for wire in node.inputs.values()}
    for node in graph.nodes.values():
        yield _task(node, pipeline, rows, wanted={wire.column for wire in read if wire.node == node.name})


def _task(node: GraphNode, pipeline: Pipeline, rows: Rows, wanted: set[str]) -> PlannedTask:
    prefix = _VALIDATION_PREFIX if rows is Rows.VALIDATION else ""
    engine = getattr(node.spec, "engine", None)
    spec = pipeline.engines[engine] if engine else None
    guest_of = spec.shares if isinstance(spec, MegatronEngineSpec) else None
    generates = node.contract.needs is Capability.GENERATE
    return PlannedTask(
        name=prefix + node.name,
        node=node.name,
        op=node.spec.op if node.spec is not None else node.name,  # type: ignore[attr-defined]
        executor=guest_of or engine or HOST,
        scope=node.contract.scope,
        rows=rows,
        engine=engine,
        inputs={column: (prefix + wire.node, wire.column) for column, wire in node.inputs.items()},
        # What nobody reads is not worth a place in the object store.
        outputs={mine: column for mine, column in node.outputs.items() if column in wanted},
        streams=generates,
        trains=node.contract.needs is Capability.TRAIN,
        generates=generates,
        frozen=guest_of is not None,
    )
