"""Infers the DAG of a pipeline from the columns that its nodes read and write; the same on every run and machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dagrl.config.columns import (
    IMAGE_COLUMNS,
    LOGPROB_COLUMNS,
    RESPONSE_IMAGE_COLUMNS,
    SHOWN_IMAGE_COLUMNS,
    SOURCE_COLUMNS,
)
from dagrl.config.errors import Place, removal
from dagrl.config.loading.positions import Findings, Positions
from dagrl.config.schema import (
    TURN_COLUMNS,
    AdvantageNode,
    BufferNode,
    CustomNode,
    FilterNode,
    JudgeNode,
    LogprobNode,
    NodeBase,
    OpContract,
    Pipeline,
    RolloutNode,
    Scope,
    UpdateNode,
)
from dagrl.graph.buffering import lead_through_buffer
from dagrl.graph.column_resolution import ColumnResolver, Reading
from dagrl.graph.dag import PROMPTS_NODE, SAMPLES_NODE, Graph, GraphNode, Wire
from dagrl.graph.updates import redundant_nodes
from dagrl.plugins.declarations import declaration_of
from dagrl.plugins.isolation import ask

_TAKEN = {
    **dict.fromkeys((PROMPTS_NODE, SAMPLES_NODE), "a node"),
    **dict.fromkeys(("step", "sync", "save"), "a time in the metrics (`time/NAME_s`)"),
}
"""Reserved names of nodes, and their owners."""
_ALL_NODES: Place = ("nodes",)


def build_graph(
    pipeline: Pipeline,
    folder: Path | None = None,
    positions: Positions | None = None,
    recorded: Mapping[str, OpContract] | None = None,
) -> Graph:
    """The graph of a pipeline with user modules in `folder`. PipelineError with all its problems.

    `recorded`: contracts of nodes with user functions, which are then not imported.
    """
    findings = Findings(positions or Positions({}))
    graph = infer_graph(pipeline, folder, findings, recorded)
    findings.raise_if_any()
    assert graph is not None
    return graph


def infer_graph(
    pipeline: Pipeline, folder: Path | None, findings: Findings, recorded: Mapping[str, OpContract] | None = None
) -> Graph | None:
    """Infer the graph and report problems and warnings to `findings`; None if there is a problem."""
    before = len(findings.problems)
    contracts = _contracts(pipeline, folder, findings, recorded)
    specs = {name: node for name, node in pipeline.nodes.items() if name in contracts}
    columns = ColumnResolver(
        contracts,
        specs,
        findings,
        source=PROMPTS_NODE,
        shown=pipeline.leading_rollout if pipeline.rollouts else "",
    )
    readings = columns.readings()
    if not pipeline.rollouts and not pipeline.data.responses:
        remedy = "add a node `{op: rollout, ...}`, or train on the data set's with `data.responses` and `{op: sft}`"
        findings.error(_ALL_NODES, f"no node samples responses; {remedy}", "missing-rollout")
    columns.warn_of_unread(readings)
    readings = lead_through_buffer(contracts, columns.outputs, specs, readings, PROMPTS_NODE)
    _report_cycle(readings, findings)
    if len(findings.problems) > before or not findings.trusted(_ALL_NODES):
        return None
    return _graph(pipeline, contracts, columns, readings)


def _contracts(
    pipeline: Pipeline, folder: Path | None, findings: Findings, recorded: Mapping[str, OpContract] | None
) -> dict[str, OpContract]:
    """Contracts of all nodes with a known contract, `prompts` first and `samples` last."""
    contracts = {PROMPTS_NODE: _source_contract(pipeline)}
    for name, node in pipeline.nodes.items():
        place: Place = ("nodes", name)
        if name in _TAKEN:
            message = f"`{name}` is the name of {_TAKEN[name]} of every pipeline; choose another name"
            findings.error(place, message, "reserved-name")
            continue
        if isinstance(node, BufferNode) and (
            first := next((other for other in contracts if isinstance(pipeline.nodes.get(other), BufferNode)), None)
        ):
            findings.error(place, removal(f"`{first}` is a buffer already, and a step has one"), "several-buffers")
            continue
        declared = None
        if node.user_function is not None:
            key, function = node.user_function
            if recorded is not None:
                if name in recorded:
                    contracts[name] = recorded[name]
                else:
                    message = f"the columns of `{function}` are unknown: the run has not recorded them"
                    findings.error((*place, *key), message, "unrecorded-columns")
                continue
            try:
                declared = ask(function, declaration_of, node, folder=folder)
            except ValueError as error:
                kind = {CustomNode: "op", FilterNode: "filter", LogprobNode: "rows"}.get(type(node), "formula")
                findings.error((*place, *key), str(error), code=f"invalid-{kind}")
                continue
        contract = node.contract(pipeline.engines.get(getattr(node, "engine", None) or ""), declared)
        if _needs_source(node, pipeline):
            contract = replace(contract, reads_if_written=(*contract.reads_if_written, "data_set"))
        contracts[name] = _with_images(contract, node) if pipeline.data.image_key else contract
    contracts[SAMPLES_NODE] = _sink_contract(pipeline)
    return contracts


def _needs_source(node: NodeBase, pipeline: Pipeline) -> bool:
    """Whether a node needs the source or validation set of a row, because these differ in sampling or in metrics."""
    data = pipeline.data
    if isinstance(node, UpdateNode | FilterNode) and data.train_prefixes:
        return True
    has_own = any(source.sampling for source in data.by_key.values())
    return has_own and isinstance(node, RolloutNode | LogprobNode | UpdateNode | AdvantageNode)


def _with_images(contract: OpContract, node: NodeBase) -> OpContract:
    """Add images of the tokens that an engine reads, and of prompts if a judge requests them."""
    if isinstance(node, JudgeNode):
        return replace(contract, reads_if_written=(*contract.reads_if_written, *(IMAGE_COLUMNS if node.images else ())))
    if contract.needs is None or "prompt_tokens" not in contract.reads:
        return contract
    if isinstance(node, RolloutNode):
        answered = RESPONSE_IMAGE_COLUMNS if node.multi_turn else ()
        # An agent may send images other than the data set's, with the prompts that it writes.
        own = (*IMAGE_COLUMNS, *SHOWN_IMAGE_COLUMNS) if node.agent else ()
        return replace(
            contract,
            reads_if_written=(*contract.reads_if_written, *(own or IMAGE_COLUMNS)),
            writes=(*contract.writes, *answered, *own),
            replaces=(*contract.replaces, *own),
        )
    answered = RESPONSE_IMAGE_COLUMNS if "response_tokens" in contract.reads else ()
    return replace(contract, reads_if_written=(*contract.reads_if_written, *IMAGE_COLUMNS, *answered))


def _source_contract(pipeline: Pipeline) -> OpContract:
    """The contract of `prompts`: the step's prompts, each repeated for its n samples."""
    demonstration = ("demonstration",) if pipeline.data.responses else ()
    images = (*IMAGE_COLUMNS, *SHOWN_IMAGE_COLUMNS) if pipeline.data.image_key else ()
    return OpContract(reads=(), writes=SOURCE_COLUMNS + demonstration + images, scope=Scope.BATCH)


def _sink_contract(pipeline: Pipeline) -> OpContract:
    """The contract of `samples`, which writes ``samples/step_N.parquet``."""
    sampled: tuple[str, ...] = ("response_tokens",) if pipeline.rollouts else ()
    if sampled and not any(_reads_no_reward(node) for node in pipeline.nodes.values()):
        sampled += ("reward",)
    optional = (
        "advantage",
        "policy_version",
        "token_version",
        "finish_reason",
        "reward_info",
        "is_expert",
        "is_replayed",
        *TURN_COLUMNS,
        *(("demonstration",) if pipeline.is_offline else ()),
        *(LOGPROB_COLUMNS if sampled and pipeline.run.sample_logprobs else ()),
        *(("reward",) if pipeline.rollouts else ()),
        "excluded",
        "agent_output",
        "trajectory_share",
        *SHOWN_IMAGE_COLUMNS,
    )
    return OpContract(
        reads=("group_id", "prompt_tokens", *sampled, "answer", "data_source", "data_set"),
        writes=(),
        scope=Scope.BATCH,
        reads_if_written=tuple(column for column in optional if column not in sampled),
    )


def _reads_no_reward(node: NodeBase) -> bool:
    """Whether a node learns from a teacher alone, or from rewards with other names."""
    match node:
        case AdvantageNode(estimator="none" | "gdpo"):
            return True
        case UpdateNode(loss=loss):
            return loss.policy == "none"
    return False


def _report_cycle(readings: list[Reading], findings: Findings) -> None:
    """Report a cycle, beginning with the node that the file declares first."""
    import networkx

    graph: networkx.DiGraph[str] = networkx.DiGraph()
    graph.add_edges_from((reading.writer, reading.reader, {"column": reading.column}) for reading in readings)
    graph.remove_edges_from([*networkx.selfloop_edges(graph)])
    if networkx.is_directed_acyclic_graph(graph):
        return
    cycle = networkx.find_cycle(graph)
    first = next(place for reading in readings for place, (writer, _) in enumerate(cycle) if writer == reading.reader)
    cycle = [*cycle[first:], *cycle[:first]]
    path = "".join(f" -> {reader} (`{graph.edges[writer, reader]['column']}`)" for writer, reader in cycle)
    message = f"nodes wait for each other in a cycle: {cycle[0][0]}{path}; let one of them read another column"
    findings.error(("nodes", cycle[0][0]), message, "cycle")


def _graph(
    pipeline: Pipeline, contracts: dict[str, OpContract], columns: ColumnResolver, readings: list[Reading]
) -> Graph:
    import networkx

    inputs: dict[str, dict[str, Wire]] = {name: {} for name in contracts}
    for reading in readings:
        inputs[reading.reader][reading.op_column] = Wire(reading.writer, reading.column)
    unordered = Graph(
        {
            name: GraphNode(name, pipeline.nodes.get(name), contract, inputs[name], columns.outputs[name])
            for name, contract in contracts.items()
        }
    )
    in_file = {name: place for place, name in enumerate(contracts)}
    order = networkx.lexicographical_topological_sort(unordered.with_selection, key=in_file.__getitem__)
    ordered = {name: unordered.nodes[name] for name in order}
    return Graph(ordered, redundant_nodes(pipeline, ordered))
