"""Checks of on-policy distillation: nodes without anything to learn from, teachers that lack rows, and teachers that
are the student.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagrl.config.columns import CORE_COLUMNS, HIDDEN_STATES, Shape
from dagrl.config.errors import Place, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import (
    AdvantageNode,
    LogprobNode,
    MergeNode,
    NodeBase,
    Pipeline,
    SelectiveNode,
    TellNode,
    TrainingNode,
    UpdateNode,
)
from dagrl.graph.dag import PROMPTS_NODE, SAMPLES_NODE, Graph, GraphNode, Wire

_OF_REWARDS = ("kl_in_reward", "overlong_buffer", "length_reward", "cosine_reward")
"""Options of ``op: advantage`` that change rewards."""
TAUGHT = ("teacher_logprob", "teacher_topk_logprob", "teacher_topk_ids", HIDDEN_STATES)
"""Columns from which a node learns."""


def check_distillation(pipeline: Pipeline, findings: Findings) -> None:
    """Report wrong options of nodes that learn from a teacher, and of teachers that read some rows."""
    for name, node in pipeline.nodes.items():
        place: Place = ("nodes", name)
        match node:
            case AdvantageNode():
                _check_advantage(pipeline, place, node, findings)
            case UpdateNode():
                if node.loss.policy == "none" and not (node.loss.distillation and node.loss.distillation.coef):
                    message = "without a policy loss there is nothing to learn; add `distillation: {}` under `loss`"
                    findings.error((*place, "loss", "policy"), message, "nothing-to-learn")
                if node.loss.policy == "none" and node.rollout_correction and node.rollout_correction.rollout_is:
                    why = "it weighs the policy loss, but `policy: none` has no policy loss"
                    findings.superfluous((*place, "rollout_correction", "rollout_is"), why)
                taught = node.loss.distillation
                if taught is not None and taught.outside == "zero" and taught.divergence in ("forward_kl", "jsd"):
                    fact = f"`{taught.divergence}` is infinite where the teacher gives a token no probability"
                    where = (*place, "loss", "distillation", "outside")
                    findings.error(where, f"{fact}; choose `bucket`", "infinite-divergence")
            case SelectiveNode():
                if isinstance(node.rows, dict):
                    known = [*pipeline.data.sources, *(() if isinstance(node, LogprobNode) else pipeline.data.val_sets)]
                    _check_rows(known, place, node.rows, findings)


def check_distillation_in_graph(pipeline: Pipeline, graph: Graph, findings: Findings) -> None:
    """Report readers of log-probs that some rows lack, and teachers that are the student."""
    validates = pipeline.data.val is not None and pipeline.run.validate_every is not None and pipeline.rollouts
    if validates and set(graph.validation.nodes) == {PROMPTS_NODE, SAMPLES_NODE}:
        message = "no node scores responses, so that a validation measures nothing; add a node `{op: reward}`"
        findings.warning(("data", "val"), message, "validation-without-reward", depends_on=[("nodes",)])
    if pipeline.rollouts and pipeline.data.ordering.adaptive and "reward" not in graph.nodes[SAMPLES_NODE].inputs:
        message = "the order learns from rewards, and no node writes any; add a node `{op: reward}`"
        findings.error(("data", "order"), message, "missing-reward")
    trained = {node.engine for node in pipeline.nodes.values() if isinstance(node, TrainingNode)}
    for name, node in graph.nodes.items():
        if isinstance(node.spec, LogprobNode) and node.spec.candidates:
            _check_candidates(name, node.inputs[node.spec.candidates], graph, findings)
        wire = next((node.inputs[column] for column in TAUGHT if column in node.inputs), None)
        _check_readers(node, graph, findings)
        if isinstance(node.spec, MergeNode):
            _check_kinds(name, node, graph, findings)
        if wire is None:
            continue
        teacher = pipeline.nodes.get(wire.node)
        if isinstance(teacher, LogprobNode) and teacher.engine in trained and not _reads_others(graph, wire.node):
            message = f"`{teacher.engine}` is the student of `{name}`, which has nothing to learn from itself"
            findings.warning(("nodes", wire.node, "engine"), f"{message}; name a teacher", "teacher-is-student")


def _reads_others(graph: Graph, teacher: str) -> bool:
    """Whether a teacher reads other columns than the policy, such as a teacher's prompt."""
    return any(wire.column != column for column, wire in graph.nodes[teacher].inputs.items())


def _check_readers(node: GraphNode, graph: Graph, findings: Findings) -> None:
    if node.spec is None or isinstance(node.spec, MergeNode):
        return
    mask = next((wire for wire in node.inputs.values() if _own_name(wire, graph) == "teacher_mask"), None)
    reported: set[str] = set()
    for column, source in node.inputs.items():
        teacher = graph.nodes[source.node].spec
        if _own_name(source, graph) == "teacher_mask" or not _may_lack(teacher) or source.node in reported:
            continue
        masked = mask is not None and (column in TAUGHT or node.spec.user_function is not None)
        if masked and mask is not None and _covers(mask, source.node, graph):
            continue
        place: Place = ("nodes", source.node, "rows")
        fact = f"`{node.name}` reads `{column}` of all rows, and this node computes some (`rows`)"
        remedy = f"add `{{op: merge, columns: [{source.column}, ...]}}`, with `uncovered: skip` if others have none"
        if isinstance(teacher, MergeNode):
            place = ("nodes", source.node, "uncovered")
            fact = f"`{node.name}` reads `{column}` of all rows, and this node has some (`skip`)"
            remedy = "set `stop`, because only distillation leaves out rows without log-probs"
        if masked and mask is not None:
            fact = f"`{node.name}` leaves out the rows that `{mask.node}` masks, and this node lacks others"
            if isinstance(graph.nodes[mask.node].spec, TellNode):
                remedy = f"{remedy}, or set `rows: {{{mask.column}: [1]}}`"
            if isinstance(teacher, MergeNode):
                remedy = f"read its own mask with `read_from: [{source.node}]` in `{node.name}`"
        reported.add(source.node)
        findings.error(place, f"{fact}; {remedy}", "rows-without-log-probs")


def _may_lack(teacher: NodeBase | None) -> bool:
    """Whether a node writes NaN for rows that it does not read."""
    if isinstance(teacher, MergeNode):
        return teacher.uncovered == "skip"
    return isinstance(teacher, SelectiveNode) and teacher.rows is not None


def _covers(mask: Wire, name: str, graph: Graph) -> bool:
    """Whether a mask is 0 in all rows that the node `name` lacks."""
    node = graph.nodes[name]
    if mask.node == name or not _may_lack(node.spec):
        return True
    given = graph.nodes[mask.node]
    if isinstance(given.spec, MergeNode) and _merged(given) == (_merged(node) or {name}):
        return True
    if isinstance(node.spec, MergeNode):
        return any(_covers(mask, teacher, graph) for teacher in _merged(node))
    rows = node.spec.rows if isinstance(node.spec, LogprobNode) else None
    return isinstance(rows, dict) and all(node.inputs[own] == mask and set(rows[own]) == {1} for own in rows)


def _merged(node: GraphNode) -> set[str]:
    """The nodes whose columns a merge takes; empty for other nodes."""
    columns = node.spec.columns if isinstance(node.spec, MergeNode) else ()
    return {node.inputs[column].node for column in columns if column in node.inputs}


def _own_name(wire: Wire, graph: Graph) -> str:
    """A column's name for the op that writes it."""
    return next(own for own, written in graph.nodes[wire.node].outputs.items() if written == wire.column)


def _check_kinds(name: str, node: GraphNode, graph: Graph, findings: Findings) -> None:
    assert isinstance(node.spec, MergeNode)
    known = [_own_name(node.inputs[column], graph) for column in node.spec.columns]
    first = next((own for own in (node.contract.writes[0], *known) if own in CORE_COLUMNS), None)
    for index, own in enumerate(known):
        if own not in CORE_COLUMNS or first is None:
            continue
        column, place = node.spec.columns[index], ("nodes", name, "columns", index)
        if CORE_COLUMNS[own].shape not in (Shape.RESPONSE, Shape.TOPK, Shape.HIDDEN) and own != "reward":
            message = (
                f"`{column}` has values {CORE_COLUMNS[own].shape.value}; name a column of response tokens, or scores"
            )
            findings.error(place, message, "wrong-column-kind")
        elif _kind(own) != _kind(first):
            message = f"`{column}` is of another kind than `{first}`; merge them in two nodes, or write another column"
            findings.error(place, message, "wrong-column-kind")


def _kind(own: str) -> tuple[Shape, str, bool]:
    """Shape and type of a built-in column, and whether it holds log-probs."""
    return CORE_COLUMNS[own].shape, CORE_COLUMNS[own].dtype, own.endswith("logprob")


def _check_advantage(pipeline: Pipeline, place: Place, node: AdvantageNode, findings: Findings) -> None:
    if node.estimator == "none":
        for option in _OF_REWARDS:
            if getattr(node, option) is not None:
                findings.superfluous((*place, option), "`estimator: none` reads no reward")
        if not (node.distillation and node.distillation.coef):
            message = "all advantages are 0; add `distillation: {}`, or choose an estimator of rewards"
            findings.error((*place, "estimator"), message, "nothing-to-learn")
    several = pipeline.rollouts and pipeline.rollouts[pipeline.leading_rollout].rows_per_sample > 1
    for option in ("discount", "early_weight"):
        if node.distillation and getattr(node.distillation, option) and several:
            message = f"the rows of a trajectory have no order; remove `sequences`, or set `{option}: 0`"
            findings.error((*place, "distillation", option), message, "turns-in-several-rows")


def _check_candidates(name: str, wire: Wire, graph: Graph, findings: Findings) -> None:
    column = CORE_COLUMNS.get(_own_name(wire, graph))
    if column is not None and (column.shape, column.dtype) != (Shape.TOPK, "int32"):
        message = f"`{wire.column}` is {column.dtype} {column.shape.value}"
        remedy = "name the ids that a node `{op: logprob, top_k: ...}` writes"
        place: Place = ("nodes", name, "candidates")
        # `scorers` reports servers and endpoints, which return none.
        findings.error(place, f"{message}; {remedy}", "wrong-column-kind", depends_on=[place])


def _check_rows(
    sources: Sequence[str], place: Place, rows: dict[str, list[str | int | float]], findings: Findings
) -> None:
    for name, values in rows.items():
        column = CORE_COLUMNS.get(name)
        if column is not None and column.shape not in (Shape.SAMPLE, Shape.TEXT):
            message = f"`{name}` has a value {column.shape.value}; name a column with one value a row"
            findings.error((*place, "rows", name), message, "wrong-column-kind")
        for index, value in enumerate(values if name == "data_set" else ()):
            if value not in sources:
                message = f"there is no source `{value}`; {suggest(str(value), sources)}"
                findings.error((*place, "rows", name, index), message, "unknown-source", depends_on=[("data", "train")])
