"""verl's ``algorithm``: advantages, the divergence in the reward, dynamic sampling and rollout correction."""

from __future__ import annotations

import re
from typing import Any

from dagrl.importing.parts import kl_estimator
from dagrl.importing.table import Translation, implied, joint, refused, refused_unless, to, under
from dagrl.importing.verl.common import ACTOR, CORRECTION, has_turns

_ESTIMATORS = {
    **{name: name for name in ("gae", "grpo", "rloo", "remax", "opo", "gpg", "gigpo", "reinforce_plus_plus")},
    "grpo_passk": "grpo_passk",
    "optimal_token_baseline": "optimal_token_baseline",
    "tir_optimal_token_baseline": "optimal_token_baseline",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "cpgd": "grpo",
}
_CRITERIA = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
_DIVERGENCES = (
    "token_k2",
    "token_k3",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)


def _estimator(t: Translation) -> None:
    key = "algorithm.adv_estimator"
    name = str(t.get(key)).rpartition(".")[2].casefold()
    t.put("nodes.advantage.op", "advantage")
    if name not in _ESTIMATORS:
        known = ", ".join(dict.fromkeys(_ESTIMATORS.values()))
        t.put("nodes.advantage.estimator", "grpo")
        reason = f"estimators are {known}, or one of your own (docs/your_own.md)"
        if name == "gdpo":
            reason = "gdpo needs a reward node for each of its rewards (docs/algorithms.md)"
        t.refuse(f"{reason}; grpo stands in", key)
        return
    t.write("nodes.advantage.estimator", _ESTIMATORS[name], key, note=_difference(t, name))
    std = "algorithm.norm_adv_by_std_in_grpo"
    mode, weight = "algorithm.gigpo.mode", "algorithm.gigpo.step_advantage_w"
    if name == "gigpo":
        # The estimator of verl-agent, which has a row for each turn.
        t.put("nodes.advantage.mean_over", "turns")
        t.copy(weight, "nodes.advantage.step_coef")
        if t.given(mode):
            t.write("nodes.advantage.normalize_by_std", t.get(mode) == "mean_std_norm", mode)
            t.imply("`gigpo.mode` takes its place", std)
    t.imply("has no effect on this estimator", mode, weight)
    if name not in ("grpo", "gigpo", "grpo_vectorized", "grpo_passk"):
        t.imply("has no effect on this estimator", std)
    elif t.given(std) and not t.is_recorded(std):
        t.write("nodes.advantage.normalize_by_std", t.get(std), std)
    for option in ("gamma", "lam"):
        option_key = f"algorithm.{option}"
        if t.given(option_key) and (name == "gae" or (name, option) == ("gigpo", "gamma")):
            t.write(f"nodes.advantage.{option}", t.get(option_key), option_key)
        elif t.get(option_key) in (None, 1, 1.0) or name not in ("reinforce_plus_plus",):
            t.imply("has no effect on this estimator", option_key)
        else:
            t.refuse("returns of reinforce_plus_plus are not discounted", option_key)
    if name == "remax":
        _greedy(t)
    if _ESTIMATORS[name] == "optimal_token_baseline" and "nodes.old.op" in t.tree:
        # Without the trainer's log-probs (`bypass_mode`) verl refuses it too.
        t.put("nodes.old.statistics", ["prob_square_sum"])


def _difference(t: Translation, name: str) -> str:
    """How ``optimal_token_baseline`` differs from verl's."""
    notes = []
    is_corrected = t.get(f"{CORRECTION}.rollout_is") in ("token", "sequence")
    if _ESTIMATORS[name] == "optimal_token_baseline" and is_corrected:
        notes.append("there, the baseline's weights have the square of those of `rollout_is` as a factor")
    if name == "optimal_token_baseline" and has_turns(t):
        notes.append("there, tokens of tools count in t; here they do not, as in tir_optimal_token_baseline")
    return "; ".join(notes)


def _greedy(t: Translation) -> None:
    """ReMax compares with the reward of the likeliest response: a second rollout and a second reward."""
    t.put("nodes.greedy.op", "rollout")
    t.put("nodes.greedy.engine", "generator")
    t.put("nodes.greedy.n", t.tree["nodes.rollout.n"])
    t.put("nodes.greedy.sampling.temperature", 0)
    t.put("nodes.greedy.sampling.max_new_tokens", t.tree["nodes.rollout.sampling.max_new_tokens"])
    t.put("nodes.baseline.op", "reward")
    t.put("nodes.baseline.read_from", ["greedy"])
    t.put("nodes.baseline.write", "baseline_reward")


def _kl_in_reward(t: Translation) -> None:
    prefix = "algorithm.kl_ctrl"
    if not t.flag("algorithm.use_kl_in_reward"):
        t.imply_all("there is no divergence in the reward")
        return
    target = "nodes.advantage.kl_in_reward"
    t.write(f"{target}.coef", t.get(f"{prefix}.kl_coef"), f"{prefix}.kl_coef")
    t.imply("`kl_in_reward` switches it on", "algorithm.use_kl_in_reward")
    estimator = kl_estimator(t.get("algorithm.kl_penalty"))
    if estimator in ("k1", "k2", "k3", "abs"):
        t.write(f"{target}.estimator", estimator, "algorithm.kl_penalty")
    else:
        t.refuse("estimators in the reward are k1, k2, k3 and abs", "algorithm.kl_penalty")
    if t.get(f"{prefix}.type") == "adaptive":
        t.write(f"{target}.target_kl", t.get(f"{prefix}.target_kl"), f"{prefix}.target_kl", f"{prefix}.type")
        t.write(f"{target}.horizon", t.get(f"{prefix}.horizon"), f"{prefix}.horizon")
    else:
        t.imply("the weight is fixed", *(f"{prefix}.{name}" for name in ("type", "target_kl", "horizon")))


def _filter(t: Translation) -> None:
    prefix = "algorithm.filter_groups"
    if not t.flag(f"{prefix}.enable"):
        t.imply_all("there is no dynamic sampling")
        return
    t.write("nodes.keep.op", "filter", f"{prefix}.enable")
    metric = f"{prefix}.metric"
    if t.get(metric) in ("reward", "acc", "score", "seq_reward", None):
        t.imply("rewards of 0 and 1 are the accuracy; `nodes.keep` looks at the reward", metric)
    else:
        t.refuse("`nodes.keep` looks at the reward before penalties", metric)
    rounds = t.number(f"{prefix}.max_num_gen_batches", 0)
    if rounds > 0:
        t.write("nodes.keep.max_rounds", rounds, f"{prefix}.max_num_gen_batches")
    else:
        t.write("nodes.keep.max_rounds", 1000, f"{prefix}.max_num_gen_batches", note="0 is no bound there")
    batch = "data.gen_batch_size"
    if t.get(batch) is not None and t.given(batch):
        t.write("nodes.keep.prompts_per_round", t.get(batch), batch)


def _reciprocal(value: float) -> float:
    return float(f"{1 / value:.12g}")


def _bounds(text: Any) -> tuple[float | None, float | None]:
    """Lower and upper bound of ``"0.5_5.0"``; a single number is the upper one."""
    found = re.fullmatch(r"\s*([\d.eE-]+)\s*[_,]\s*([\d.eE-]+)\s*", str(text))
    if found:
        return float(found[1]), float(found[2])
    return (None, float(text)) if isinstance(text, int | float) else (None, None)


def _correction(t: Translation) -> None:
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    is_key, is_bound, normalize, rs_key, rs_bound = (f"{CORRECTION}.{name}" for name in names)
    target = "nodes.update.rollout_correction"
    level, bypass = t.get(is_key), t.flag(f"{CORRECTION}.bypass_mode")
    if bypass and t.get(f"{CORRECTION}.loss_type") != "reinforce":
        reason = "`bypass_mode` has no weights but with `loss_type: reinforce`: the ratio is that to the generator"
        t.imply(reason, is_key, is_bound, normalize)
    elif level in ("token", "sequence"):
        t.write(f"{target}.rollout_is", level, is_key)
        low, high = _bounds(t.get(is_bound))
        t.write(f"{target}.rollout_is_threshold", high, is_bound)
        if low is not None:
            t.write(f"{target}.rollout_is_threshold_lower", low, is_bound)
        if t.flag(normalize) and bypass:
            t.refuse("the mean of all weights needs log-probs from before the update", normalize)
        elif t.flag(normalize):
            t.write(f"{target}.rollout_is_batch_normalize", True, normalize)
    _rejection(t, rs_key, rs_bound, target)
    if bypass:
        t.write("nodes.update.read", {"old_logprob": "rollout_logprob"}, f"{CORRECTION}.bypass_mode")
    veto = f"{CORRECTION}.rollout_token_veto_threshold"
    if t.number(veto):
        t.write(f"{target}.rollout_token_veto_threshold", t.get(veto), veto)
    rest = [key for key in t.current if not t.is_recorded(key)]
    t.imply("is off, or has no effect without `rollout_is` or `rollout_rs`", *rest)


def _rejection(t: Translation, key: str, bound: str, target: str) -> None:
    """Criteria and their thresholds, divided by commas; a single threshold is that of all."""
    if t.get(key) is None:
        return
    names, given = ([part.strip() for part in str(t.get(option)).split(",")] for option in (key, bound))
    given = given * len(names) if len(given) == 1 else given
    found = [_limits(*option) for option in zip(names, given, strict=False)]
    if None in found or len(names) != len(given) or len(set(names)) != len(names):
        t.refuse("criteria are token_k1 to token_k3, or seq_sum, seq_mean or seq_max of them, with bounds", key, bound)
        return
    criteria, highs, lows = zip(*(option for option in found if option), strict=True)
    columns = {"rollout_rs": criteria, "rollout_rs_threshold": highs, "rollout_rs_threshold_lower": lows}
    for name, column in columns.items():
        if any(value is not None for value in column):
            source, note = (key, "") if name == "rollout_rs" else (bound, "reciprocals of verl's bounds of k1")
            t.write(f"{target}.{name}", list(column) if len(column) > 1 else column[0], source, note=note)


def _limits(name: str, text: str) -> tuple[str, float, float | None] | None:
    """The criterion, its largest value and its smallest, or None if verl knows no such one.

    Verl's bounds of k1 are of the generator's probability over the trainer's, dagrl's of its reciprocal.
    """
    try:
        *low, high = map(float, text.split("_"))
    except ValueError:
        return None
    if name in _DIVERGENCES and not low:
        return name, high, None
    if name in _CRITERIA and len(low) < 2 and high > 0:
        return _CRITERIA[name], _reciprocal(low[0]) if low else high, _reciprocal(high)
    return None


RULES = (
    joint(
        _estimator,
        "algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo algorithm.gamma algorithm.lam algorithm.gigpo.*",
        always=True,
    ),
    joint(_kl_in_reward, "algorithm.use_kl_in_reward algorithm.kl_penalty algorithm.kl_ctrl.* algorithm.kl_ctrl"),
    joint(_filter, "algorithm.filter_groups.* data.gen_batch_size"),
    joint(_correction, under(CORRECTION, "*"), f"{CORRECTION}"),
    to("algorithm.step_advantage_w", "nodes.advantage.step_coef"),
    refused(
        "each reward is a node with `write: NAME`; `nodes.advantage.rewards` has their weights",
        "algorithm.gdpo_reward_keys algorithm.gdpo_reward_weights",
    ),
    refused_unless((False, None), "samples are not drawn again by reward", "algorithm.use_pf_ppo"),
    implied(
        "follows from the estimator",
        "algorithm.pf_ppo* algorithm._target_",
        under(ACTOR, "use_rollout_log_probs calculate_sum_pi_squared sum_pi_squared_checkpointing"),
    ),
)
