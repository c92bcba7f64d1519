"""Responses of the data set, and the nodes that learn from them: ``data.responses``, ``sft``, ``dpo``, ``mix``."""

from __future__ import annotations

from dagrl.config.errors import Place, listed
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import (
    AdvantageNode,
    CriticNode,
    DpoNode,
    JudgeNode,
    MixNode,
    Pipeline,
    RewardModelNode,
    RewardNode,
    RolloutNode,
    UpdateNode,
)
from dagrl.graph.offline import is_offline, rows_per_prompt, tells_val_loss
from dagrl.graph.rollouts import leading_rollout, rollouts

_RESPONSES: Place = ("data", "responses")
_LONGEST: Place = ("data", "max_response_tokens")
_PAIR = 2
"""Responses to a prompt that ``dpo`` compares."""


def check_offline(pipeline: Pipeline, findings: Findings) -> None:
    """Report responses that nobody can read, pairs that are none, and experts that do not fit among samples."""
    _check_responses(pipeline, findings)
    for name, node in pipeline.nodes.items():
        if isinstance(node, DpoNode):
            _check_pairs(pipeline, name, node, findings)
        elif isinstance(node, MixNode):
            _check_mix(pipeline, name, node, findings)
    _check_told(pipeline, findings)


def _check_responses(pipeline: Pipeline, findings: Findings) -> None:
    data = pipeline.data
    for option in ("max_response_tokens", "overlong_responses"):
        if not data.responses and option in data.model_fields_set:
            message = "has no effect without `responses`, the columns that hold some; add them, or take it out"
            findings.error(("data", option), message, depends_on=[_RESPONSES])
    if data.responses and data.max_response_tokens is None:
        message = "nothing says how long these may be; add `max_response_tokens` under `data`"
        findings.error(_RESPONSES, message, depends_on=[_LONGEST])
    doubled = [name for name in data.responses if data.responses.count(name) > 1]
    if doubled:
        findings.error(_RESPONSES, f"`{doubled[0]}` is named twice; a column's responses come once, so take one out")


def _check_pairs(pipeline: Pipeline, name: str, node: DpoNode, findings: Findings) -> None:
    place: Place = ("nodes", name)
    if node.label_smoothing and node.loss != "sigmoid":
        message = f"`loss: {node.loss}` has no use for it; take it out"
        findings.error((*place, "label_smoothing"), message, depends_on=[(*place, "loss")])
    if not pipeline.data.responses:
        return  # That there is no demonstration is told with the columns.
    if len(pipeline.data.responses) != _PAIR:
        message = (
            f"`{name}` compares two responses to a prompt, and there is {len(pipeline.data.responses)}; name two "
            "columns, the better one first, such as `responses: [chosen, rejected]`"
        )
        findings.error(_RESPONSES, message, depends_on=[place])
    elif (rows := rows_per_prompt(pipeline)) != _PAIR:
        leading = leading_rollout(pipeline)
        message = f"`{name}` compares the two rows of a prompt, and `{leading}` makes {rows}; set `n: 2`"
        findings.error(("nodes", leading, "n"), message, depends_on=[place])
    elif tells_val_loss(pipeline) and node.val_loss and (found := rows_per_prompt(pipeline, validation=True)) != _PAIR:
        leading = leading_rollout(pipeline)
        message = (
            f"`{name}` tells its loss on two responses to a validation prompt, and `{leading}` gives it {found}; set "
            f"`val_n: 2` and `val_sampling` there, or `val_loss: false` in `{name}`"
        )
        findings.error(("nodes", leading), message, depends_on=[place])


def _check_mix(pipeline: Pipeline, name: str, node: MixNode, findings: Findings) -> None:
    place: Place = ("nodes", name)
    if is_offline(pipeline):
        message = (
            "nothing is trained on samples among which it could put the data set's; learn from those with `op: sft`"
        )
        findings.error(place, message, depends_on=[("nodes",)])
        return
    if len(rollouts(pipeline)) > 1:
        message = f"works where there is one rollout, and there are {len(rollouts(pipeline))}; take it out"
        findings.error(place, message)
        return
    leading = leading_rollout(pipeline)
    _check_room(pipeline, leading, rollouts(pipeline)[leading], place, node, findings)
    for other_name, other in pipeline.nodes.items():
        if isinstance(other, CriticNode):
            message = f"`{other_name}` would learn values of responses that the policy never gave; take it out"
            findings.error(place, message, depends_on=[("nodes", other_name)])
    replaying = [key for key, engine in pipeline.engines.items() if engine.replays_routes]
    if replaying:
        message = f"an expert's tokens have no routes that {listed(replaying)} could replay; take it out"
        findings.error(place, message, depends_on=[("engines", replaying[0], "router_replay")])
    if not any(isinstance(other, UpdateNode) and other.loss.sft_coef for other in pipeline.nodes.values()):
        message = "no update learns from what it mixes in; set `sft_coef` in its `loss`, such as 0.1"
        findings.warning(place, message, depends_on=[("nodes",)])


def _check_room(
    pipeline: Pipeline, leading: str, rollout: RolloutNode, place: Place, node: MixNode, findings: Findings
) -> None:
    """Experts' responses take the place of samples, and are no longer than those."""
    compares = any(isinstance(other, AdvantageNode) for other in pipeline.nodes.values())
    least = 2 if compares else 1
    given, longest = len(pipeline.data.responses), pipeline.data.max_response_tokens
    if rollout.n - node.per_prompt < least:
        message = (
            f"{node.per_prompt} of the {rollout.n} responses to a prompt (nodes.{leading}.n) would be an expert's, and "
            f"the others too few to be compared; set `n: {node.per_prompt + least}` or more there"
        )
        findings.error((*place, "per_prompt"), message, depends_on=[("nodes", leading, "n")])
    if 0 < given < node.per_prompt:
        message = f"the data set has {given} for each prompt (data.responses); name more columns, or lower this"
        findings.error((*place, "per_prompt"), message, depends_on=[_RESPONSES])
    if longest and longest > rollout.sampling.max_new_tokens:
        message = (
            f"{longest} tokens are more than a sample may have (nodes.{leading}.sampling.max_new_tokens = "
            f"{rollout.sampling.max_new_tokens}), and `{place[1]}` puts responses among samples; lower it"
        )
        findings.error(_LONGEST, message, depends_on=[("nodes", leading, "sampling", "max_new_tokens")])


def _check_told(pipeline: Pipeline, findings: Findings) -> None:
    """Report validations that have nothing to tell, and rollouts for validations that there are not."""
    run = pipeline.run
    scores = any(isinstance(node, RewardNode | RewardModelNode | JudgeNode) for node in pipeline.nodes.values())
    validates = bool(run.validate_every) or run.validate_first
    for name in rollouts(pipeline) if is_offline(pipeline) and not validates else ():
        message = (
            "nothing is trained on what it samples, and nothing is validated; set `run.validate_every`, or take it"
        )
        findings.warning(("nodes", name), f"{message} out", depends_on=[("nodes",), ("run",)])
    if validates and is_offline(pipeline) and not scores and not tells_val_loss(pipeline):
        key = "validate_every" if run.validate_every else "validate_first"
        message = (
            "nothing is told of validation prompts; take `val_loss: false` out, add a rollout and a reward, or take"
        )
        findings.error(("run", key), f"{message} this out", depends_on=[("nodes",)])
