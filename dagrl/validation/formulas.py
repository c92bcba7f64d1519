"""Advantages and losses: options that a formula does not know, and what it needs that it does not get."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dagrl.config.errors import Place, dotted
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import AdvantageNode, CovarianceNode, LossSpec, Pipeline, RolloutNode, UpdateNode
from dagrl.graph.dag import Graph
from dagrl.graph.op_contracts import contract_of
from dagrl.graph.plugins.formulas import check_formula_at, formula_of, own_formula, place_of_formula
from dagrl.graph.plugins.isolation import ask
from dagrl.graph.rollouts import leading_rollout, rollouts

_OF_ESTIMATORS = {
    "normalize_by_std": ("grpo",),
    "gamma": ("gae",),
    "lam": ("gae",),
    "baseline": ("opmd",),
    "tau": ("opmd",),
}
"""Options that only some estimators know."""
_CLIPPED = ("ppo_clip", "gspo", "gmpo", "cispo", "cpgd", "clip_cov")
_OF_LOSSES = {
    "clip_ratio": _CLIPPED,
    "clip_ratio_high": _CLIPPED,
    "dual_clip": ("ppo_clip",),
    "drift_coef": ("cpgd",),
    "kl_cov_coef": ("kl_cov",),
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
    "tau": ("opmd", "opmd_kimi", "opmd_pairwise"),
}
"""Options that only some losses know."""


def check_formulas(pipeline: Pipeline, graph: Graph | None, folder: Path, findings: Findings) -> None:
    """Report what is wrong with advantages and losses; `folder` holds the user's own modules.

    `graph` is None where the columns are not sorted out yet.
    """
    for name, node in pipeline.nodes.items():
        place: Place = ("nodes", name)
        if isinstance(node, AdvantageNode):
            _check_options(place, "estimator", node.estimator, node, _OF_ESTIMATORS, findings)
            _check_own(place, node, folder, findings)
            _check_advantage(pipeline, place, node, findings)
            _check_group_size(pipeline, name, node, findings)
            if graph is not None and node.estimator == "remax":
                _check_baseline(name, graph, findings)
        elif isinstance(node, UpdateNode):
            _check_options((*place, "loss"), "policy", node.loss.policy, node.loss, _OF_LOSSES, findings)
            _check_own(place, node, folder, findings)
            _check_loss(pipeline, place, node, findings)
        elif isinstance(node, CovarianceNode) and node.between and node.between[0] >= node.between[1]:
            lower, upper = node.between
            message = f"no number is above {lower:g} and below {upper:g}; write the lower bound first, as in [1.0, 5.0]"
            findings.error((*place, "between"), message)
    if graph is not None:
        _check_greedy(pipeline, graph, findings)


def _check_options(
    place: Place,
    key: str,
    form: str,
    section: AdvantageNode | LossSpec,
    known: Mapping[str, tuple[str, ...]],
    findings: Findings,
) -> None:
    for option in (*known, "args"):
        own = ":" in form
        foreign = not own if option == "args" else form not in known[option]
        if option in section.model_fields_set and foreign and getattr(section, option) is not None:
            remedy = "give it in `args`, if your function takes it, or take it out" if own else "take it out"
            findings.error((*place, option), f"`{key}: {form}` has no use for it; {remedy}")


def _check_own(place: Place, node: AdvantageNode | UpdateNode, folder: Path, findings: Findings) -> None:
    name = own_formula(node)
    if name is None:
        return
    try:
        ask(name, formula_of, node, folder=folder)
    except ValueError:
        return  # `infer_graph` says what is wrong.
    where = (*place, *place_of_formula(node))
    args = node.loss.args if isinstance(node, UpdateNode) else node.args
    try:
        ask(name, check_formula_at, node, folder=folder)
    except ValueError as error:
        findings.error((*where[:-1], "args") if args else where, str(error))


def _check_group_size(pipeline: Pipeline, name: str, node: AdvantageNode, findings: Findings) -> None:
    if not rollouts(pipeline):
        return
    leading = leading_rollout(pipeline)
    alone = node.model_copy(update={"length_reward": None})
    compares = own_formula(node) is None and "group_id" in contract_of(alone).reads
    if (compares or node.length_reward) and rollouts(pipeline)[leading].n < 2:
        what = node.estimator if compares else "length_reward"
        message = f"`{name}` compares the responses to a prompt ({what}), and there is only 1; set `n: 2` or more"
        findings.error(("nodes", leading, "n"), message)


def _check_advantage(pipeline: Pipeline, place: Place, node: AdvantageNode, findings: Findings) -> None:
    if node.estimator == "opmd" and node.baseline == "mean" and "tau" in node.model_fields_set:
        message = "the mean of a group has no temperature; set `baseline: logavgexp`, or take it out"
        findings.error((*place, "tau"), message)
    if node.kl_in_reward and "horizon" in node.kl_in_reward.model_fields_set and node.kl_in_reward.target_kl is None:
        message = "without `target_kl` the weight stays as it is; add that, or take this out"
        findings.error((*place, "kl_in_reward", "horizon"), message)
    if node.kl_in_reward and node.kl_in_reward.target_kl is not None and node.kl_in_reward.coef == 0:
        message = (
            "a weight that is steered grows and shrinks from where it begins, and 0 stays 0; begin with 0.001 or so"
        )
        findings.error((*place, "kl_in_reward", "coef"), message)
    sampling = {name: rollout.sampling for name, rollout in rollouts(pipeline).items()}
    if node.overlong_buffer is None or not sampling:
        return
    name = max(sampling, key=lambda each: sampling[each].max_new_tokens)
    if node.overlong_buffer.len > sampling[name].max_new_tokens:
        longest: Place = ("nodes", name, "sampling", "max_new_tokens")
        message = (
            f"{node.overlong_buffer.len} tokens are more than the longest response has "
            f"({dotted(longest)} = {sampling[name].max_new_tokens}); lower it"
        )
        findings.error((*place, "overlong_buffer", "len"), message, depends_on=[longest])


def _check_baseline(name: str, graph: Graph, findings: Findings) -> None:
    """ReMax's baseline must be the reward of another response than the one it is compared with."""
    inputs = graph.nodes[name].inputs
    judged, baseline = (graph.sampled_by(inputs[column].node) for column in ("reward", "baseline_reward"))
    if judged is not None and judged == baseline:
        message = (
            f"`baseline_reward` and `reward` are both of responses of `{judged}`; let its writer, "
            f"`{inputs['baseline_reward'].node}`, read from a rollout of its own, with `sampling: {{temperature: 0}}`"
        )
        findings.error(("nodes", name), message)


def _check_greedy(pipeline: Pipeline, graph: Graph, findings: Findings) -> None:
    """A rollout that always takes the likeliest token is a baseline; there is nothing to learn from its responses."""
    for name, node in pipeline.nodes.items():
        if not isinstance(node, RolloutNode) or node.sampling.temperature > 0:
            continue
        if any(
            isinstance(each.spec, UpdateNode) and graph.sampled_by(each.name) == name for each in graph.nodes.values()
        ):
            message = "0 always draws the same response, and nothing can be learned from that; choose 1.0 or so"
            findings.error(("nodes", name, "sampling", "temperature"), message)


def _check_loss(pipeline: Pipeline, place: Place, node: UpdateNode, findings: Findings) -> None:
    """What a form of the loss is not what its paper means without."""
    loss, where = node.loss, (*place, "loss", "policy")
    if loss.policy == "gspo" and "clip_ratio" not in loss.model_fields_set:
        message = (
            f"gspo clips the mean ratio of whole responses, which hardly ever moves by {loss.clip_ratio}; set "
            "`clip_ratio: 3.0e-4` and `clip_ratio_high: 4.0e-4`, as in the paper"
        )
        findings.warning(where, message)
    several = node.optimizer_steps(pipeline.data.prompts_per_step) > 1
    weighted = node.rollout_correction is not None and node.rollout_correction.rollout_is is not None
    if loss.policy == "reinforce" and several and not weighted:
        message = (
            "from the second optimizer step on, the samples are an older policy's, and reinforce has no ratio to "
            "account for that; take out `mini_batch` and `epochs`, choose cispo, or set `rollout_correction`"
        )
        findings.warning(where, message)
