"""Checks of advantages, losses, critics and demonstrations: ignored options, and missing inputs."""

from __future__ import annotations

from pathlib import Path

from dagrl.config.errors import Place, dotted, removal
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import (
    AdvantageNode,
    CovarianceNode,
    CriticNode,
    CustomNode,
    DpoNode,
    LogprobNode,
    MixNode,
    Pipeline,
    RolloutCorrectionSpec,
    RolloutNode,
    UpdateNode,
    ValuesNode,
)
from dagrl.graph.dag import Graph
from dagrl.graph.updates import updates_with_dropout
from dagrl.plugins.custom import check_call
from dagrl.plugins.declarations import declaration_of
from dagrl.plugins.isolation import ask
from dagrl.validation.advantages import check_advantage, check_advantage_in_graph
from dagrl.validation.corrections import check_correction

_RESPONSES: Place = ("data", "responses")
_PAIR = 2
"""Responses to a prompt that ``dpo`` compares."""

_MARKS = {"clip_cov": ("covariance", "top_entropy"), "kl_cov": ("covariance",), "m2po": ("second_moment",)}
"""Losses -> their marks from ``op: covariance``."""
_MARKED = {
    "clip_cov": "remove its `second_moment`",
    "kl_cov": "remove its `second_moment` and `top_entropy`",
    "m2po": "set its `second_moment: 0.04`",
}


def check_training(pipeline: Pipeline, folder: Path, findings: Findings) -> None:
    """Report wrong options of advantages, losses and nodes that learn from the data set's responses.

    `folder` holds the user's modules.
    """
    _check_responses(pipeline, findings)
    critics = {node.engine for node in pipeline.nodes.values() if isinstance(node, CriticNode)}
    for name, node in pipeline.nodes.items():
        place: Place = ("nodes", name)
        match node:
            case AdvantageNode():
                _check_own(place, node, folder, findings)
                check_advantage(pipeline, name, node, findings)
            case UpdateNode():
                _check_own(place, node, folder, findings)
                _check_update(pipeline, place, node, findings)
                if node.rollout_correction is not None:
                    check_correction(node.rollout_correction, (*place, "rollout_correction"), findings)
            case CustomNode():
                _check_own(place, node, folder, findings)
            case CovarianceNode(between=(lower, upper)) if lower >= upper:
                message = f"no number is above {lower:g} and below {upper:g}; write the lower bound first"
                findings.error((*place, "between"), message, "crossed-bounds")
            case ValuesNode() if node.engine not in critics:
                message = f"nothing trains this critic; add a node `{{op: critic, engine: {node.engine}}}`"
                depends: list[Place] = [("engines", node.engine)]
                findings.warning((*place, "engine"), message, "untrained-critic", depends_on=depends)
            case DpoNode():
                _check_pairs(pipeline, name, node, findings)
            case MixNode():
                _check_mix(pipeline, name, node, findings)


def check_training_in_graph(pipeline: Pipeline, graph: Graph, findings: Findings) -> None:
    """Report columns that come from the wrong node: values, baselines, old log-probs, greedy samples."""
    _check_policy_of_old(pipeline, graph, findings)
    for name, node in pipeline.nodes.items():
        match node:
            case AdvantageNode():
                check_advantage_in_graph(name, node, graph, findings)
            case CriticNode():
                _check_own_values(name, node, graph, findings)
            case UpdateNode(rollout_correction=RolloutCorrectionSpec() as correction):
                _check_old(pipeline, name, node, correction, graph, findings)
            case RolloutNode():
                trained_on = [each.name for each in graph.nodes.values() if isinstance(each.spec, UpdateNode)]
                trained = any(graph.sampled_by(update) == name for update in trained_on)
                for place, sampling in pipeline.samplings(name, validated=False).items():
                    if trained and sampling.temperature == 0:
                        message = "0 always samples the same response, which teaches nothing; choose for example 1.0"
                        findings.error((*place, "temperature"), message, "greedy-samples")


def _check_policy_of_old(pipeline: Pipeline, graph: Graph, findings: Findings) -> None:
    for name, node in graph.nodes.items():
        wire = node.inputs.get("old_logprob")
        source = graph.nodes[graph.origin(wire).node] if wire else None
        if source is None or not isinstance(node.spec, UpdateNode) or not isinstance(source.spec, LogprobNode):
            continue
        engine = pipeline.engines.get(source.spec.engine or "")
        if node.spec.engine not in (source.spec.engine, engine.frozen_copy_of if engine else None):
            message = f"`{name}` takes these log-probs for those of `{node.spec.engine}` before the update, and "
            message += "they are another model's; write `teacher_logprob` or `ref_logprob` if they are meant for that"
            key = "engine" if source.spec.engine else "endpoint"
            findings.warning(("nodes", source.name, key), message, "old-of-another-model")


def _check_own_values(name: str, node: CriticNode, graph: Graph, findings: Findings) -> None:
    """Report a critic that trains on another critic's values."""
    writer = graph.nodes[name].inputs["value"].node
    spec = graph.nodes[writer].spec
    if isinstance(spec, ValuesNode) and spec.engine != node.engine:
        specs = {other: graph_node.spec for other, graph_node in graph.nodes.items()}
        values = [other for other, its in specs.items() if isinstance(its, ValuesNode) and its.engine == node.engine]
        remedy = f"set `read: {{value: {values[0]}.value}}`" if values else "name one engine in both"
        message = f"it trains `{node.engine}` on values of `{spec.engine}`; {remedy}"
        depends: list[Place] = [("nodes", writer)]
        findings.error(("nodes", name, "engine"), message, "values-of-another-critic", depends_on=depends)


def _check_own(place: Place, node: AdvantageNode | CustomNode | UpdateNode, folder: Path, findings: Findings) -> None:
    if node.user_function is None:
        return
    key, name = node.user_function
    try:
        ask(name, declaration_of, node, folder=folder)
    except ValueError:
        return  # `infer_graph` reports it.
    where = (*place, *key)
    args, given = (node.loss.args, "tokens") if isinstance(node, UpdateNode) else (node.args, "batch")
    code = "invalid-op" if isinstance(node, CustomNode) else "invalid-formula"
    with findings.reporting((*where[:-1], "args") if args else where, code):
        remedy = f"it gets the {given} and the node's args, so fix `args`"
        ask(name, check_call, name, remedy, (None,), args, folder=folder)


def _check_update(pipeline: Pipeline, place: Place, node: UpdateNode, findings: Findings) -> None:
    loss, where = node.loss, (*place, "loss", "policy")
    if loss.policy == "gspo" and "clip_ratio" not in loss.model_fields_set:
        message = (
            "ratios of responses stay close to 1; set `clip_ratio: 3.0e-4` and `clip_ratio_high: 4.0e-4` (the paper's)"
        )
        findings.warning(where, message, "clip-ratio-of-gspo")
    several = node.optimizer_steps(pipeline.data.prompts_per_step) > 1
    weighted = node.rollout_correction is not None and node.rollout_correction.rollout_is is not None
    if loss.policy == "reinforce" and several and not weighted:
        message = "only the first optimizer step is on-policy; take one, choose cispo, or set `rollout_correction`"
        findings.warning(where, message, "off-policy-reinforce")
    _check_marks(pipeline, where, loss.policy, findings)
    if loss.policy == "m2po":
        _check_m2po(where, node, several, findings)
    if loss.off_policy_delta is not None and not several and not node.takes_rollout_for_old:
        message = "the ratio is 1 in a step's only optimizer step; set `read: {old_logprob: rollout_logprob}`"
        findings.warning((*place, "loss", "off_policy_delta"), message, "mask-without-effect")
    if loss.policy == "none" and loss.off_policy_delta is not None:
        findings.superfluous((*place, "loss", "off_policy_delta"), "`policy: none` has no policy loss")
    if not node.critic_warmup:
        return
    if not any(isinstance(other, CriticNode) for other in pipeline.nodes.values()):
        message = removal("there is no critic", "add a node `{op: critic, ...}`")
        findings.error((*place, "critic_warmup"), message, "missing-critic")
    elif node.critic_warmup >= pipeline.run.steps and not pipeline.run.only_validates:
        message = f"the policy is never trained, as run.steps = {pipeline.run.steps}; lower it"
        findings.error((*place, "critic_warmup"), message, "warmup-too-long")


def _check_marks(pipeline: Pipeline, where: Place, policy: str, findings: Findings) -> None:
    marks = {name: node for name, node in pipeline.nodes.items() if isinstance(node, CovarianceNode)}
    if marks and policy in _MARKS and not any(node.marks in _MARKS[policy] for node in marks.values()):
        name, node = next(iter(marks.items()))
        message = f"nodes.{name} marks tokens by their {node.marks.replace('_', ' ')}; {_MARKED[policy]}"
        findings.error(where, message, "marks-of-another-loss")


def _check_m2po(where: Place, node: UpdateNode, several: bool, findings: Findings) -> None:
    if not node.takes_rollout_for_old:
        message = "its ratio is that to the generator; set `read: {old_logprob: rollout_logprob}`"
        findings.warning(where, message, "ratio-to-the-trainer")
    if several:
        message = "only the first optimizer step trains the policy that the marks were made for; take one"
        findings.warning(where, message, "marks-of-another-step")


def _check_old(
    pipeline: Pipeline, name: str, node: UpdateNode, spec: RolloutCorrectionSpec, graph: Graph, findings: Findings
) -> None:
    place: Place = ("nodes", name, "rollout_correction")
    has_old = "old_logprob" in graph.nodes[name].inputs and not node.takes_rollout_for_old
    old = f"{{op: logprob, engine: {node.engine}, write: old_logprob}}"
    if updates_with_dropout(pipeline, node) and not has_old:
        message = f"`lora.dropout` changes the log-probs that it compares; add a node `{old}`, or set the dropout to 0"
        findings.error(place, message, "missing-old-logprob")
    if spec.rollout_is is None:
        return
    if node.loss.policy == "vespo":
        why = "vespo's own weight must know the whole ratio to the generator"
        remedy = "set `read: {old_logprob: rollout_logprob}`"
        findings.error((*place, "rollout_is"), removal(why, remedy), "ratio-counted-twice")
        return
    if node.takes_rollout_for_old and node.loss.has_ratio:
        why = (
            f"{node.loss.policy} already has the ratio to the generator, as `read` takes its log-probs for the old ones"
        )
        findings.error((*place, "rollout_is"), removal(why, "set `policy: reinforce`"), "ratio-counted-twice")
        return
    if spec.rollout_is_batch_normalize and not has_old:
        message = removal("the mean of all weights must be known before the first micro-batch", f"add a node `{old}`")
        findings.error((*place, "rollout_is_batch_normalize"), message, "missing-old-logprob")
    if node.loss.policy == "reinforce" and has_old and node.optimizer_steps(pipeline.data.prompts_per_step) > 1:
        message = "later optimizer steps need current log-probs; remove the node that writes `old_logprob`"
        findings.warning((*place, "rollout_is"), message, "off-policy-reinforce")


def _check_responses(pipeline: Pipeline, findings: Findings) -> None:
    data = pipeline.data
    if data.responses and data.max_response_tokens is None:
        message = "the length of responses is unbounded; add `max_response_tokens` under `data`"
        findings.error(_RESPONSES, message, "missing-max-response-tokens")
    if doubled := next((name for name in data.responses if data.responses.count(name) > 1), None):
        findings.error(_RESPONSES, f"`{doubled}` is named twice; remove one of them", "duplicate-column")


def _check_pairs(pipeline: Pipeline, name: str, node: DpoNode, findings: Findings) -> None:
    responses = pipeline.data.responses
    if not responses:
        return  # `infer_graph` reports the missing column.
    if len(responses) != _PAIR:
        message = f"`{name}` compares two responses to a prompt; name two columns, for example `[chosen, rejected]`"
        findings.error(_RESPONSES, message, "not-a-pair")
    elif rows := next((n for n in pipeline.group_sizes().values() if n != _PAIR), 0):
        leading = pipeline.leading_rollout
        message = f"`{name}` compares the two rows of a prompt, and `{leading}` makes {rows}; set `n: 2`"
        findings.error(("nodes", leading, "n"), message, "not-a-pair")
    elif pipeline.reports_val_loss and node.val_loss and pipeline.rows_per_prompt(validation=True) != _PAIR:
        leading = pipeline.leading_rollout
        message = f"`{name}` validates on two responses to a prompt; set `val_n: 2`, or its `val_loss: false`"
        findings.error(("nodes", leading), message, "not-a-pair")


def _check_mix(pipeline: Pipeline, name: str, node: MixNode, findings: Findings) -> None:
    place: Place = ("nodes", name)
    rollouts = pipeline.rollouts
    if pipeline.is_offline or len(rollouts) != 1:
        message = "needs one rollout whose samples are trained on; use `op: sft` for responses of the data set alone"
        findings.error(place, message, "mix-without-rollout")
        return
    (leading,) = rollouts
    least = 2 if any(isinstance(other, AdvantageNode) for other in pipeline.nodes.values()) else 1
    given, longest = len(pipeline.data.responses), pipeline.data.max_response_tokens
    needed = node.per_prompt + least
    for where, n in pipeline.ns_by_place.items():
        if n < needed:
            message = f"too few of the {n} responses to a prompt are sampled; set {dotted(where)} to {needed} or more"
            findings.error((*place, "per_prompt"), message, "group-too-small")
    if 0 < given < node.per_prompt:
        message = f"the data set has {given} for each prompt (data.responses); name more columns, or lower it"
        findings.error((*place, "per_prompt"), message, "too-few-responses")
    for where, sampling in pipeline.samplings(leading, validated=False).items():
        if longest and longest > (limit := sampling.max_new_tokens):
            message = f"{longest} tokens are more than {dotted(where)}.max_new_tokens = {limit}; lower it"
            findings.error(("data", "max_response_tokens"), message, "response-too-long")
    for critic in [key for key, other in pipeline.nodes.items() if isinstance(other, CriticNode)]:
        message = f"`{critic}` would learn values of responses that the policy did not sample; remove one of them"
        findings.error(place, message, "mix-with-critic")
    if any(engine.replays_routes for engine in pipeline.engines.values()):
        message = "responses of the data set have no routes to replay; remove it, or `router_replay`"
        findings.error(place, message, "mix-with-router-replay")
    if not any(isinstance(other, UpdateNode) and other.loss.sft_coef for other in pipeline.nodes.values()):
        message = "no update trains on the mixed-in responses; set `sft_coef` in its `loss`, for example 0.1"
        findings.warning(place, message, "mix-not-trained-on")
