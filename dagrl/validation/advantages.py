"""Advantages: options that an estimator ignores, and rewards, columns and rows that it cannot use."""

from __future__ import annotations

from dagrl.config.errors import Place, removal
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import AdvantageNode, Pipeline
from dagrl.graph.dag import Graph

_OF_PLAIN_REWARDS = {
    "maxrl": "rewards must not be negative",
    "passk": "rewards must be 0 or 1",
    "gdpo": "each reward is compared by itself",
}
"""Estimators that penalties on the reward would spoil, with the reason."""
_PENALTIES = ("kl_in_reward", "overlong_buffer", "length_reward", "cosine_reward")


def check_advantage(pipeline: Pipeline, name: str, node: AdvantageNode, findings: Findings) -> None:
    """Report incompatible options, and responses that cannot be compared."""
    place: Place = ("nodes", name)
    if node.estimator == "gdpo" and not node.rewards:
        message = (
            "there is no reward to compare; name the columns and their weights, `rewards: {correct: 1, polite: 0.5}`"
        )
        findings.error((*place, "estimator"), message, "missing-rewards")
    if node.deviation == "batch" and node.estimator in ("gigpo", "gdpo", "grpo_passk"):
        message = f"`{node.estimator}` compares within groups; set it to true or false"
        findings.error((*place, "normalize_by_std"), message, "option-without-effect")
    if node.estimator == "opmd" and node.baseline == "mean" and "tau" in node.model_fields_set:
        findings.superfluous((*place, "tau"), "a mean has no temperature", "set `baseline: logavgexp`")
    for option in _PENALTIES:
        if node.estimator in _OF_PLAIN_REWARDS and getattr(node, option) is not None:
            message = f"{_OF_PLAIN_REWARDS[node.estimator]} with `estimator: {node.estimator}`"
            findings.error((*place, option), removal(message), "penalty-on-plain-reward")
    kl = node.kl_in_reward
    if kl and kl.target_kl is not None and kl.coef == 0:
        message = "the weight is adapted by factors, so 0 stays 0; start with for example 0.001"
        findings.error((*place, "kl_in_reward", "coef"), message, "coefficient-of-zero")
    rollouts = pipeline.rollouts
    if not rollouts:
        return
    leading = pipeline.leading_rollout
    if rollouts[leading].rows_per_sample > 1:
        _check_rows_of_trajectory(place, node, findings)
    compares = (
        node.user_function is None and "group_id" in node.model_copy(update={"length_reward": None}).contract().reads
    )
    if compares or node.length_reward:
        what = node.estimator if compares else "length_reward"
        message = f"`{name}` compares the responses to a prompt ({what}), and there is only 1; set `n: 2` or more"
        for where in (where for where, n in pipeline.ns_by_place.items() if n < 2):
            findings.error(where, message, "group-too-small")
    if node.estimator == "passk":
        for where in (where for where, n in pipeline.ns_by_place.items() if n < node.k):
            message = (
                f"`{name}` takes the best of {node.k} responses to a prompt; set `n: {node.k}` or more, or lower `k`"
            )
            findings.error(where, message, "group-too-small")
    if node.overlong_buffer:
        own = [sampling.max_new_tokens for sampling in pipeline.own_samplings(leading).values()]
        limit = min([max(rollout.sampling.max_new_tokens for rollout in rollouts.values()), *own])
        if node.overlong_buffer.len > limit:
            message = f"{node.overlong_buffer.len} tokens exceed max_new_tokens, {limit}; lower it"
            findings.error((*place, "overlong_buffer", "len"), message, "buffer-too-long")


def check_advantage_in_graph(name: str, node: AdvantageNode, graph: Graph, findings: Findings) -> None:
    """Report a baseline or teacher of the same samples, and baselines of roles in rounds."""
    inputs = graph.nodes[name].inputs
    if "teacher_logprob" in inputs and inputs["teacher_logprob"] == inputs.get("old_logprob"):
        message = "teacher and student are one column, so that the teacher's advantages are 0; read"
        findings.warning(("nodes", name), f"{message} each from a separate node", "teacher-is-student")
    if node.estimator == "remax":
        _check_baseline(name, graph, findings)
    if node.estimator == "rae" and name in graph.in_rounds:
        message = "its baselines follow the order of steps, not the filter's rounds; filter by another column"
        findings.error(("nodes", name, "estimator"), message, "state-in-rounds")


def _check_rows_of_trajectory(place: Place, node: AdvantageNode, findings: Findings) -> None:
    what = None
    if node.estimator == "gigpo":
        what = "it compares the turns of one conversation"
    elif node.estimator == "gae" and not (
        node.gamma == node.lam == 1 and node.lam_value in (None, 1) and node.length_adaptive_alpha is None
    ):
        what = "it discounts by the order of a trajectory's tokens"
    elif node.estimator in ("optimal_token_baseline", "agentic_reinforce"):
        what = "it goes by the order of a trajectory's tokens"
    if what:
        message = f"{what}, and a trajectory may have several rows; remove `sequences`"
        message += ", or set only `gamma: 1` and `lam: 1`" if node.estimator == "gae" else ""
        findings.error((*place, "estimator"), message, "turns-in-several-rows")
    if node.kl_in_reward and node.estimator in ("gae", "reinforce_plus_plus", "remax"):
        message = "the rows of a trajectory have no order; remove `sequences`, or use `kl_coef` of the loss instead"
        findings.error((*place, "kl_in_reward"), message, "turns-in-several-rows")


def _check_baseline(name: str, graph: Graph, findings: Findings) -> None:
    """ReMax's baseline must be the reward of another response than the one that it is compared with."""
    inputs = graph.nodes[name].inputs
    wires = (graph.origin(inputs[column]) for column in ("reward", "baseline_reward"))
    judged, baseline = (graph.sampled_by(wire.node) for wire in wires)
    if judged is not None and judged == baseline:
        message = f"both rewards score the responses of `{judged}`; score a greedy rollout for `baseline_reward`"
        findings.error(("nodes", name), message, "baseline-of-same-samples")
