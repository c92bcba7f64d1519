"""On-policy distillation: learning from nothing, teachers that lack rows, and teachers that are the student."""

from __future__ import annotations

from dagrl.config.columns import CORE_COLUMNS, Shape
from dagrl.config.errors import Place, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import (
    AdvantageNode,
    LogprobNode,
    LossDistillationSpec,
    MergeNode,
    Pipeline,
    TrainingNode,
    UpdateNode,
)
from dagrl.graph.dag import PROMPTS_NODE, SAMPLES_NODE, Graph, GraphNode, Wire

_OF_REWARDS = ("kl_in_reward", "overlong_buffer", "length_reward", "cosine_reward")
"""Options of ``op: advantage`` that change rewards."""
_TAUGHT = ("teacher_logprob", "teacher_topk_logprob", "teacher_topk_ids")


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
                    why = "it weighs the policy loss, and `policy: none` has none"
                    findings.superfluous((*place, "rollout_correction", "rollout_is"), why)
                if node.loss.distillation is not None:
                    _check_divergence((*place, "loss", "distillation"), node.loss.distillation, findings)
            case LogprobNode():
                if isinstance(node.rows, dict):
                    _check_rows(pipeline, place, node.rows, findings)
                if node.candidates and node.top_k:
                    findings.superfluous((*place, "top_k"), f"the tokens are those of `{node.candidates}`")


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
        wire = next((node.inputs[column] for column in _TAUGHT if column in node.inputs), None)
        for column, source in node.inputs.items():
            teacher = pipeline.nodes.get(source.node)
            if not isinstance(teacher, LogprobNode) or teacher.rows is None or node.spec is None:
                continue
            if isinstance(node.spec, MergeNode) or (column in _TAUGHT and "teacher_mask" in node.inputs):
                continue
            remedy = f"add `{{op: merge, columns: [{source.column}, ...]}}`, with `uncovered: skip` if others have none"
            message = f"`{name}` reads `{column}` of all rows, and this node computes some (`rows`); {remedy}"
            findings.error(("nodes", source.node, "rows"), message, "rows-without-log-probs")
        if isinstance(node.spec, MergeNode):
            _check_kinds(name, node, graph, findings)
        if wire is None:
            continue
        teacher = pipeline.nodes.get(wire.node)
        if isinstance(teacher, LogprobNode) and teacher.engine in trained and not teacher.read:
            message = f"`{teacher.engine}` is the student of `{name}`, which has nothing to learn from itself"
            findings.warning(("nodes", wire.node, "engine"), f"{message}; name a teacher", "teacher-is-student")


def _check_kinds(name: str, node: GraphNode, graph: Graph, findings: Findings) -> None:
    """Report columns of a merge that differ in kind, or that hold no numbers of tokens."""
    kinds: dict[str, tuple[Shape, str]] = {}
    for index, column in enumerate(node.spec.columns if isinstance(node.spec, MergeNode) else ()):
        wire = node.inputs[column]
        own = next(own for own, there in graph.nodes[wire.node].outputs.items() if there == wire.column)
        spec = CORE_COLUMNS.get(own)
        if spec is None:
            continue
        kinds[column] = spec.shape, spec.dtype
        place: Place = ("nodes", name, "columns", index)
        first = next(iter(kinds))
        if spec.shape not in (Shape.RESPONSE, Shape.TOPK):
            message = f"`{column}` has values {spec.shape.value}; name a column of response tokens"
            findings.error(place, message, "wrong-column-kind")
        elif kinds[column] != kinds[first]:
            message = f"`{column}` is of another kind than `{first}`; merge them in two nodes"
            findings.error(place, message, "wrong-column-kind")


def _check_advantage(pipeline: Pipeline, place: Place, node: AdvantageNode, findings: Findings) -> None:
    if node.estimator == "none":
        for option in _OF_REWARDS:
            if getattr(node, option) is not None:
                findings.superfluous((*place, option), "`estimator: none` reads no reward")
        if not (node.distillation and node.distillation.coef):
            message = "all advantages are 0; add `distillation: {}`, or choose an estimator of rewards"
            findings.error((*place, "estimator"), message, "nothing-to-learn")
    several = pipeline.rollouts and pipeline.rollouts[pipeline.leading_rollout].rows_per_sample > 1
    if node.distillation and node.distillation.discount and several:
        message = "the rows of a trajectory have no order; remove `sequences`, or set `discount: 0`"
        findings.error((*place, "distillation", "discount"), message, "turns-in-several-rows")


def _check_candidates(name: str, wire: Wire, graph: Graph, findings: Findings) -> None:
    """Report a column whose values are no token ids for each place."""
    own = next(column for column, written in graph.nodes[wire.node].outputs.items() if written == wire.column)
    column = CORE_COLUMNS.get(own)
    if column is not None and (column.shape, column.dtype) != (Shape.TOPK, "int32"):
        message = f"`{wire.column}` is {column.dtype} {column.shape.value}"
        remedy = "name the ids that a node `{op: logprob, top_k: ...}` writes"
        place: Place = ("nodes", name, "candidates")
        # `scorers` has reported servers and endpoints, which return none.
        findings.error(place, f"{message}; {remedy}", "wrong-column-kind", depends_on=[place])


def _check_divergence(place: Place, spec: LossDistillationSpec, findings: Findings) -> None:
    """Report options that a divergence does not have."""
    if spec.divergence not in ("mixed_kl", "jsd") and "alpha" in spec.model_fields_set:
        findings.superfluous((*place, "alpha"), f"`{spec.divergence}` is no mean of two divergences")
    for option in ("outside", "min_logprob"):
        if not spec.over_candidates and option in spec.model_fields_set:
            message = f"`{spec.divergence}` is an estimate from the sampled tokens"
            findings.superfluous((*place, option), message, "choose `reverse_kl` over the teacher's likeliest tokens")
    if spec.outside == "zero" and spec.divergence in ("forward_kl", "jsd"):
        message = f"`{spec.divergence}` is infinite where the teacher gives a token no probability; choose `bucket`"
        findings.error((*place, "outside"), message, "infinite-divergence")


def _check_rows(pipeline: Pipeline, place: Place, rows: dict[str, list[str | int | float]], findings: Findings) -> None:
    for name, values in rows.items():
        column = CORE_COLUMNS.get(name)
        if column is not None and column.shape not in (Shape.SAMPLE, Shape.TEXT):
            message = f"`{name}` has a value {column.shape.value}; name a column with one value a row"
            findings.error((*place, "rows", name), message, "wrong-column-kind")
        sources = pipeline.data.sources
        for index, value in enumerate(values if name == "data_set" else ()):
            if value not in sources:
                message = f"there is no source `{value}`; {suggest(str(value), sources)}"
                findings.error((*place, "rows", name, index), message, "unknown-source", depends_on=[("data", "train")])
