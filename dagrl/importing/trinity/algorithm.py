"""Trinity-RFT's ``algorithm``: advantages, loss and divergence."""

from __future__ import annotations

from dagrl.importing.parts import is_known, kl_estimator, put_critic_nodes, put_logprob, put_node, put_reference
from dagrl.importing.table import Translation, joint
from dagrl.importing.trinity.common import TYPES, type_default, uses_critic

_ESTIMATORS = {
    "ppo": "gae",
    "grpo": "grpo",
    "reinforceplusplus": "reinforce_plus_plus",
    "rloo": "rloo",
    "remax": "remax",
    "opmd": "opmd",
    "gigpo": "gigpo",
}
_LOSSES = {"ppo": "ppo_clip", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "topr": "topr", "opmd": "opmd"}
_CLIPS = {"ppo": (0.2, 0.2), "gspo": (0.0003, 0.0004), "cispo": (None, 0.28)}
"""Trinity's default bounds of the ratio."""
_CLIP_KEYS = ("clip_range", "clip_range_low", "clip_range_high", "clip_ratio_c")


def _algorithm(t: Translation) -> None:
    key, advantage = "algorithm.algorithm_type", "algorithm.advantage_fn"
    kind = t.get(key)
    t.put("nodes.advantage.op", "advantage")
    put_node(t, "update", "update", "actor")
    name = t.get(advantage) or type_default(t, 0)
    if kind not in TYPES:
        t.put("nodes.advantage.estimator", "grpo")
        t.refuse("has no counterpart here, or is a pipeline of its own (docs/offline.md); grpo stands in", key)
        return
    if name in _ESTIMATORS:
        t.write("nodes.advantage.estimator", _ESTIMATORS[name], *((advantage,) if t.given(advantage) else (key,)))
        if t.given(advantage):
            t.write("nodes.advantage.estimator", _ESTIMATORS[name], key, advantage)
    else:
        t.put("nodes.advantage.estimator", "grpo")
        t.refuse("has no counterpart: an estimator of your own (docs/your_own.md); grpo stands in", advantage, key)
    arguments = {"gamma": "gamma", "lam": "lam", "opmd_baseline": "baseline", "tau": "tau", "omega": "step_coef"}
    for option, target in arguments.items():
        each = f"algorithm.advantage_fn_args.{option}"
        t.copy(each, f"nodes.advantage.{target}")
    std = "algorithm.advantage_fn_args.std_threshold"
    if t.number(std):
        t.write("nodes.keep.op", "filter", std)
        t.write("nodes.keep.min_std", t.get(std), std)
    if uses_critic(t):
        put_critic_nodes(t)
        t.put("nodes.critic.mini_batch", t.tree["nodes.update.mini_batch"])
        path = "model.critic_model_path"
        if is_known(t.get(path)) and t.get(path) not in ("", t.get("model.model_path")):
            t.write("engines.critic.model.path", t.get(path), path)
        else:
            t.imply("the critic starts from the policy's weights", path)


def _loss(t: Translation) -> None:
    key, prefix = "algorithm.policy_loss_fn", "algorithm.policy_loss_fn_args"
    name = t.get(key) or type_default(t, 1)
    if name not in _LOSSES:
        arguments = [each for each in t.current if each.startswith(f"{prefix}.")]
        t.refuse("has no counterpart: a loss of your own (docs/your_own.md); ppo stands in", key, *arguments)
        t.write(
            "nodes.update.loss.aggregation", t.get("algorithm.loss_agg_mode") or "token-mean", "algorithm.loss_agg_mode"
        )
        return
    if name != "ppo" or t.given(key):
        t.write("nodes.update.loss.policy", _LOSSES[name], key if t.given(key) else "algorithm.algorithm_type")
    if name in _CLIPS:
        _clip(t, name, prefix)
    for option in ("tau", "tau_pos", "tau_neg"):
        t.copy(f"{prefix}.{option}", f"nodes.update.loss.{option}")
    mode = f"{prefix}.loss_agg_mode" if t.given(f"{prefix}.loss_agg_mode") else "algorithm.loss_agg_mode"
    if name != "gspo" or t.given(mode):
        t.write("nodes.update.loss.aggregation", t.get(mode) or "token-mean", mode)
    entropy = "algorithm.entropy_loss_fn_args.entropy_coef"
    t.write("nodes.update.loss.entropy_coef", t.get(entropy, 0.0), entropy)
    t.imply("a coefficient of 0 switches it off", "algorithm.entropy_loss_fn")


def _clip(t: Translation, name: str, prefix: str) -> None:
    low, high = _CLIPS[name]
    both = f"{prefix}.clip_range"
    for target, key, default in (
        ("clip_ratio", f"{prefix}.clip_range_low", low),
        ("clip_ratio_high", f"{prefix}.clip_range_high", high),
    ):
        used = key if t.given(key) or not t.given(both) else both
        value = t.get(used, default)
        if value is not None and not (name == "cispo" and target == "clip_ratio"):
            t.write(f"nodes.update.loss.{target}", value, used)
    dual = f"{prefix}.clip_ratio_c"
    if name == "ppo":
        t.write("nodes.update.loss.dual_clip", t.get(dual, 3.0), dual)


def _divergence(t: Translation) -> None:
    key, coef = "algorithm.kl_loss_fn", "algorithm.kl_loss_fn_args.kl_coef"
    name = t.get(key) or type_default(t, 2)
    estimator = kl_estimator(name)
    if name in (None, "none"):
        t.imply("there is no divergence in the loss", key, coef)
    elif estimator is None:
        t.refuse("estimators are k1, k2, k3 and abs", key)
    else:
        t.write("nodes.update.loss.kl_estimator", estimator, key)
        t.write("nodes.update.loss.kl_coef", t.get(coef, 0.001), coef)
    penalty, prefix = "algorithm.kl_penalty_fn", "algorithm.kl_penalty_fn_args"
    if t.get(penalty) in (None, "none"):
        t.imply("there is no divergence in the reward", penalty, *(k for k in t.current if k.startswith(prefix)))
    else:
        t.write("nodes.advantage.kl_in_reward.coef", t.get(f"{prefix}.kl_coef", 0.001), f"{prefix}.kl_coef")
        t.write("nodes.advantage.kl_in_reward.estimator", kl_estimator(t.get(penalty)) or "k1", penalty)
        if t.flag(f"{prefix}.adaptive"):
            for name in ("target_kl", "horizon"):
                t.write(
                    f"nodes.advantage.kl_in_reward.{name}",
                    t.get(f"{prefix}.{name}"),
                    f"{prefix}.{name}",
                    f"{prefix}.adaptive",
                )
    bypass = "algorithm.bypass_old_logprobs"
    if t.get(bypass) is False or "nodes.advantage.kl_in_reward.coef" in t.tree:
        put_logprob(t, "old", "actor", "old_logprob")
        t.imply("`nodes.old` computes them", bypass)
    else:
        t.write(
            "nodes.update.read", {"old_logprob": "rollout_logprob"}, bypass, note="ratios to the explorer's log-probs"
        )
    put_reference(t)


RULES = (
    joint(
        _algorithm,
        "algorithm.algorithm_type algorithm.advantage_fn algorithm.advantage_fn_args.* model.critic_model_path",
        always=True,
    ),
    joint(
        _loss,
        "algorithm.policy_loss_fn algorithm.policy_loss_fn_args.* algorithm.loss_agg_mode "
        "algorithm.entropy_loss_fn algorithm.entropy_loss_fn_args.* "
        "algorithm.entropy_loss_fn_args.entropy_coef",
        *(f"algorithm.policy_loss_fn_args.{name}" for name in _CLIP_KEYS),
        always=True,
    ),
    joint(
        _divergence,
        "algorithm.kl_loss_fn algorithm.kl_loss_fn_args.kl_coef algorithm.kl_penalty_fn "
        "algorithm.kl_penalty_fn_args.* algorithm.bypass_old_logprobs",
        always=True,
    ),
)
