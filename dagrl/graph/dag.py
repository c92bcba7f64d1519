"""The pipeline's DAG: nodes, and the columns that travel between them. `inference` infers it.

Beside the declared nodes there are two implicit ones: `prompts`, the data set, and `samples`, which stores the samples.
Where the pipeline is cut in two (`cut`), `experience` stands for the other part.
A column is identified by its writer and its name in the pipeline, after ``write:``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from dagrl.config.capability import Capability
from dagrl.config.schema import (
    DemonstrationNode,
    FilterNode,
    JudgeNode,
    NodeBase,
    OpContract,
    RewardModelNode,
    RewardNode,
    RolloutNode,
)

if TYPE_CHECKING:
    import networkx

PROMPTS_NODE = "prompts"
SAMPLES_NODE = "samples"
EXPERIENCE_NODE = "experience"
"""Name of the implicit node in place of omitted nodes: a sink, or, in place of `prompts`, the source."""


class Wire(NamedTuple):
    """The source of a column."""

    node: str
    """The node that writes it."""
    column: str
    """Its name in the pipeline: a value in the writer's `outputs`."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node and its connections."""

    name: str
    spec: NodeBase | None
    """Its section of the file; None for the implicit nodes."""
    contract: OpContract
    inputs: Mapping[str, Wire]
    """Column that the op reads, by the op's name -> its source."""
    outputs: Mapping[str, str]
    """Column that the op writes, by the op's own name -> its name in the pipeline."""


@dataclass(frozen=True)
class Graph:
    """The nodes of a pipeline in topological order."""

    nodes: Mapping[str, GraphNode]
    """Nodes by name, in topological order; ties are in the order of the file."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Nodes that need not run -> the reason; see `redundant_nodes`."""
    sampled: Mapping[str, str] = field(default_factory=dict)
    """Node -> the rollout, outside of this part of the pipeline, whose responses it processes."""

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the nodes, in topological order."""
        return tuple(self.nodes)

    @cached_property
    def digraph(self) -> networkx.DiGraph[str]:
        """The DAG for networkx: a node's attribute ``node`` is its `GraphNode`, an edge's ``columns`` are column names.

        Nodes and edges are in topological order.
        """
        # Imported late, because the import takes 0.15 s.
        import networkx

        graph: networkx.DiGraph[str] = networkx.DiGraph()
        graph.add_nodes_from((name, {"node": node}) for name, node in self.nodes.items())
        for reader, node in self.nodes.items():
            for wire in dict.fromkeys(node.inputs.values()):
                columns = graph.edges[wire.node, reader]["columns"] if graph.has_edge(wire.node, reader) else ()
                graph.add_edge(wire.node, reader, columns=(*columns, wire.column))
        return graph

    @cached_property
    def with_selection(self) -> networkx.DiGraph[str]:
        """`digraph` with an edge, without columns, from the filter to each node of `select_from`."""
        graph = self.digraph.copy()
        if self.filter:
            chosen = [(self.filter, name) for name in self.select_from]
            graph.add_edges_from((edge for edge in chosen if not graph.has_edge(*edge)), columns=())
        return graph

    @cached_property
    def edges(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """(writer, reader) -> names of the columns that travel between them."""
        edges = self.digraph.edges
        return {edge: edges[edge]["columns"] for name in self.nodes for edge in self.digraph.in_edges(name)}

    def producers(self, name: str) -> tuple[str, ...]:
        """Nodes that `name` reads from, in topological order."""
        return self._in_order(self.digraph.predecessors(name))

    def consumers(self, name: str) -> tuple[str, ...]:
        """Nodes that read from `name`, in topological order."""
        return self._in_order(self.digraph.successors(name))

    def ancestors(self, name: str) -> frozenset[str]:
        """All nodes that must run before `name` can."""
        import networkx

        return frozenset(networkx.ancestors(self.digraph, name))

    def _in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        wanted = set(names)
        return tuple(name for name in self.nodes if name in wanted)

    def sampled_by(self, name: str) -> str | None:
        """The rollout whose responses a node processes: itself, the writer of its inputs, or the last one before it."""
        if isinstance(self.nodes[name].spec, RolloutNode):
            return name
        if name in self.sampled:
            return self.sampled[name]
        inputs = self.nodes[name].inputs
        wires = [inputs[column] for column in ("response_tokens", "response_mask") if column in inputs]
        before = self.ancestors(name)
        last = [node for node in reversed(self.order) if node in before]
        candidates = [*(self.origin(wire).node for wire in (*wires, *inputs.values())), *last]
        return next((node for node in candidates if isinstance(self.nodes[node].spec, RolloutNode)), None)

    def origin(self, wire: Wire) -> Wire:
        """The source of a column before the nodes that replace it, such as a mix of responses or a buffer."""
        node = self.nodes[wire.node]
        own = next((own for own, there in node.outputs.items() if there == wire.column), "")
        if own not in node.contract.replaces or own not in node.inputs or isinstance(node.spec, RolloutNode):
            return wire
        return self.origin(node.inputs[own])

    @cached_property
    def filter(self) -> str | None:
        """The node that selects the groups of a step."""
        return next((name for name, node in self.nodes.items() if isinstance(node.spec, FilterNode)), None)

    @cached_property
    def in_rounds(self) -> frozenset[str]:
        """Nodes that run once a round, until enough groups pass the filter: the filter and all nodes before it."""
        return frozenset({self.filter, *self.ancestors(self.filter)}) if self.filter else frozenset()

    @cached_property
    def select_from(self) -> tuple[str, ...]:
        """Nodes outside the rounds that read only from nodes in them: the first readers of the selected groups."""
        outside = [node for node in self.nodes.values() if node.name not in self.in_rounds]
        return tuple(
            node.name
            for node in outside
            if self.filter and self.in_rounds.issuperset(wire.node for wire in node.inputs.values())
        )

    @cached_property
    def validates_only(self) -> frozenset[str]:
        """Nodes that run in validation only: rollouts without training, and their descendants.

        Empty if something is trained on the samples of a rollout.
        """
        sampling = self._rollouts
        trained = [name for name, node in self.nodes.items() if node.contract.needs is Capability.TRAIN]
        behind = {name for name in self.nodes if sampling & self.ancestors(name)}
        if not trained or behind.intersection(trained):
            return frozenset()
        return frozenset(sampling | behind - {SAMPLES_NODE})

    @property
    def _rollouts(self) -> set[str]:
        return {name for name, node in self.nodes.items() if isinstance(node.spec, RolloutNode)}

    @cached_property
    def working(self) -> Graph:
        """The graph without the skipped nodes and their columns."""
        return self._without(self.skipped)

    @cached_property
    def training(self) -> Graph:
        return self._without(self.validates_only)

    @cached_property
    def validation(self) -> Graph:
        """The nodes that run in validation: nodes that rewards depend on, and `samples`.

        If nothing is trained on samples, also the nodes that compute the loss on the validation set, without training.
        """
        graph = self._without_replacing()
        sink = graph.nodes[SAMPLES_NODE]
        offline = self._rollouts <= self.validates_only
        reported = {sink.inputs["reward"].node} if "reward" in sink.inputs else set()
        for name, node in graph.nodes.items():
            learns = isinstance(node.spec, DemonstrationNode) and node.spec.val_loss
            scores = isinstance(node.spec, RewardNode | RewardModelNode | JudgeNode) and not graph._is_baseline(name)
            if scores or (learns and offline):
                reported.add(name)
        needed = reported.union(*map(graph.ancestors, reported), {PROMPTS_NODE})
        kept = {name: node for name, node in graph.nodes.items() if name in needed}
        for name, node in kept.items():
            if node.contract.needs is Capability.TRAIN:
                kept[name] = replace(node, contract=replace(node.contract, needs=Capability.SCORE))
        # Without a loss on validation sets, these need no responses.
        with_loss = any(isinstance(node.spec, DemonstrationNode) for node in kept.values())
        seen = {
            column: wire
            for column, wire in sink.inputs.items()
            if wire.node in needed and (with_loss or column != "demonstration")
        }
        kept[SAMPLES_NODE] = replace(sink, inputs=seen)
        return Graph(kept)

    def _is_baseline(self, name: str) -> bool:
        """Whether the node's only column is read as ``baseline_reward``."""
        read = {column for node in self.nodes.values() for column, wire in node.inputs.items() if wire.node == name}
        return read == {"baseline_reward"}

    def _without(self, left_out: Collection[str]) -> Graph:
        return self._rewired(lambda wire: None if wire.node in left_out else wire, left_out)

    def _without_replacing(self) -> Graph:
        """The graph without nodes that replace columns: readers get the original columns."""
        replacing = {
            name
            for name, node in self.nodes.items()
            # An agent's rollout replaces prompts by the contexts that it sampled from.
            if node.contract.replaces and not isinstance(node.spec, RolloutNode)
        }

        def source(wire: Wire) -> Wire | None:
            origin = self.origin(wire)
            return None if origin.node in replacing else origin

        return self._rewired(source, replacing)

    def _rewired(self, source: Callable[[Wire], Wire | None], left_out: Collection[str]) -> Graph:
        """The remaining nodes, with each input replaced by its `source` or dropped."""
        nodes = {}
        for name, node in self.nodes.items():
            if name not in left_out:
                wires = {column: source(wire) for column, wire in node.inputs.items()}
                kept = {column: wire for column, wire in wires.items() if wire is not None}
                nodes[name] = replace(node, inputs=kept)
        return Graph(nodes, sampled=self.sampled)
