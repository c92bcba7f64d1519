"""Cuts the graph of a pipeline in two: one part writes experience, the other trains on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from dagrl.config.capability import Capability
from dagrl.config.errors import listed, suggest
from dagrl.config.schema import BufferNode, OpContract, Pipeline, Scope
from dagrl.graph.dag import EXPERIENCE_NODE, PROMPTS_NODE, SAMPLES_NODE, Graph, GraphNode, Wire

ROW_COLUMNS = ("sample_id", "group_id")
"""Columns that number the rows of a batch. They are always in a file of experience."""


class PartError(ValueError):
    """A pipeline cannot be cut into this part. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One part of a pipeline."""

    graph: Graph
    """The nodes of the part, and `experience` in place of the others."""
    explores: bool
    """Whether it writes experience; otherwise it trains on it."""
    columns: Mapping[str, tuple[str, ...]]
    """Column of a file of experience -> nodes after the cut that read it."""


def cut(graph: Graph, pipeline: Pipeline, only: Sequence[str]) -> Cut:
    """The part of a graph with the nodes `only`, the nodes between them, and the nodes on engines that these train.

    PartError if a node does not exist, or the cut is not possible.
    """
    declared = [name for name in graph.order if name not in (PROMPTS_NODE, SAMPLES_NODE)]
    for name in only:
        if name not in declared:
            raise PartError(f"--only: there is no node `{name}`; {suggest(name, declared)}")
    if EXPERIENCE_NODE in declared:
        raise PartError(f"--only: `{EXPERIENCE_NODE}` is the node that stands for those left out; rename yours")
    skipped, graph = graph.skipped, graph.working
    kept = _kept(graph, pipeline, [name for name in only if name not in skipped])
    left_out = [name for name in declared if name in graph.nodes and name not in kept]
    explores = _explores(graph, kept, left_out)
    _check(graph, pipeline, kept, left_out, explores=explores)
    behind = {SAMPLES_NODE, *(left_out if explores else kept)}
    names = _names({name: node for name, node in graph.nodes.items() if name not in behind})
    readers: dict[str, dict[str, None]] = {}
    for reader in behind & graph.nodes.keys():
        for wire in graph.nodes[reader].inputs.values():
            if wire.node not in behind and wire.column not in ROW_COLUMNS:
                readers.setdefault(names[wire], {})[reader] = None
    columns = {name: tuple(node for node in graph.order if node in readers[name]) for name in sorted(readers)}
    part = (_exploring if explores else _training)(graph, kept, names, columns)
    sampled = {name: rollout for name in kept if (rollout := graph.sampled_by(name)) is not None}
    return Cut(replace(part, sampled={} if explores else sampled), explores, columns)


def _kept(graph: Graph, pipeline: Pipeline, only: Iterable[str]) -> set[str]:
    kept = set(only)
    while True:
        trained = {_home(graph, pipeline, name) for name in kept if _trains(graph, name)}
        # No other engine can compute their log-probs, or the log-probs of frozen copies on their ranks.
        kept |= {name for name in graph.nodes if (home := _home(graph, pipeline, name)) and home in trained}
        between = {name for name in graph.nodes if name not in (PROMPTS_NODE, SAMPLES_NODE)}
        between &= {before for name in kept for before in graph.ancestors(name)}
        more = {name for name in between if graph.ancestors(name) & kept} - kept
        if not more:
            return kept
        kept |= more


def _home(graph: Graph, pipeline: Pipeline, name: str) -> str | None:
    """The engine on whose ranks a node runs."""
    engine = getattr(graph.nodes[name].spec, "engine", None)
    return pipeline.engines[engine].frozen_copy_of or engine if engine else None


def _trains(graph: Graph, name: str) -> bool:
    return graph.nodes[name].contract.needs is Capability.TRAIN


def _explores(graph: Graph, kept: Set[str], left_out: Sequence[str]) -> bool:
    if not left_out:
        raise PartError("--only leaves no node out; run the pipeline without it")
    gives = [name for name in left_out if kept & {*graph.producers(name)}]
    takes = [name for name in kept if set(left_out).intersection(graph.producers(name))]
    if gives and takes:
        given = {writer for name in takes for writer in graph.producers(name)}
        before = listed(name for name in left_out if name in given)
        raise PartError(
            f"--only: nodes are left out before ({before}) and after ({listed(gives)}) those that are named, and a "
            "part either writes experience or reads it; name more nodes"
        )
    if not gives and not takes:
        raise PartError(f"--only: {listed(left_out)} share no column with the nodes that are named; name others")
    return bool(gives)


def _check(graph: Graph, pipeline: Pipeline, kept: Collection[str], left_out: Sequence[str], *, explores: bool) -> None:
    chooser = graph.filter
    if chooser is not None and (chooser in kept) != explores:
        remedy = f"name `{chooser}` in the part that samples"
        raise PartError(f"--only: the filter `{chooser}` has further prompts sampled until a batch is full; {remedy}")
    for name in graph.order:
        if isinstance(graph.nodes[name].spec, BufferNode) and (name in kept) == explores:
            raise PartError(f"--only: `{name}` keeps samples for later updates; name it in the part that trains")
    if not explores:
        if not any(_trains(graph, name) for name in kept):
            raise PartError("--only: no node that is named trains, so that nothing would be done with experience")
        return
    for name in graph.order:
        if name in kept and _trains(graph, name):
            readers = listed(node for node in left_out if set(kept).intersection(graph.producers(node)))
            raise PartError(f"--only: `{name}` trains, and {readers} read what this part writes; name these too")
    trained = {_home(graph, pipeline, name): name for name in left_out if _trains(graph, name)}
    for name in graph.order:
        home = _home(graph, pipeline, name) if name in kept else None
        if home in trained:
            raise PartError(
                f"--only: `{name}` runs on the ranks of `{home}`, which `{trained[home]}` trains; leave it to that part"
            )


def _names(writers: Mapping[str, GraphNode]) -> dict[Wire, str]:
    """The names of columns in files, prefixed by the node if several of `writers` write a column."""
    wires = [Wire(name, column) for name, node in writers.items() for column in node.outputs.values()]
    number = Counter(wire.column for wire in wires)
    return {wire: wire.column if number[wire.column] == 1 else f"{wire.node}.{wire.column}" for wire in wires}


def _exploring(graph: Graph, kept: Collection[str], names: Mapping[Wire, str], columns: Mapping[str, object]) -> Graph:
    there = {PROMPTS_NODE, *kept}
    nodes = {name: node for name, node in graph.nodes.items() if name in there}
    samples = graph.nodes[SAMPLES_NODE]
    inputs = {column: wire for column, wire in samples.inputs.items() if wire.node in there}
    if inputs.keys() >= set(samples.contract.reads):
        nodes[SAMPLES_NODE] = replace(samples, inputs=inputs)
    wires = {name: wire for wire, name in names.items()}
    read = {column: wires[column] for column in (*ROW_COLUMNS, *columns)}
    contract = OpContract(reads=tuple(read), scope=Scope.BATCH)
    nodes[EXPERIENCE_NODE] = GraphNode(EXPERIENCE_NODE, None, contract, read, {})
    return Graph(nodes)


def _training(graph: Graph, kept: Collection[str], names: Mapping[Wire, str], columns: Mapping[str, object]) -> Graph:
    writes = (*ROW_COLUMNS, *columns)
    contract = OpContract(reads=(), writes=writes, scope=Scope.BATCH)
    source = GraphNode(EXPERIENCE_NODE, None, contract, {}, {column: column for column in writes})

    def origin(wire: Wire) -> Wire:
        return wire if wire.node in kept else Wire(EXPERIENCE_NODE, names[wire])

    nodes = {EXPERIENCE_NODE: source}
    for name, node in graph.nodes.items():
        if name in kept or name == SAMPLES_NODE:
            nodes[name] = replace(node, inputs={column: origin(wire) for column, wire in node.inputs.items()})
    return Graph(nodes)
