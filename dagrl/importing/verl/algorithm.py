"""verl's ``algorithm``: advantages, the divergence in the reward, dynamic sampling and rollout correction."""

from __future__ import annotations

import re
from typing import Any

from dagrl.importing import parts
from dagrl.importing.table import Translation, implied, joint, refused, to, under
from dagrl.importing.verl.common import ACTOR, CORRECTION, has_turns

_ESTIMATORS = {
    **{name: name for name in ("gae", "grpo", "rloo", "remax", "opo", "gpg", "gigpo", "reinforce_plus_plus")},
    **{name: name for name in ("grpo_passk", "optimal_token_baseline", "reinforce_plus_plus_baseline")},
    "tir_optimal_token_baseline": "optimal_token_baseline",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "cpgd": "grpo",
}
_CRITERIA = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
_DIVERGENCES = [f"{over}_{k}" for over in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k2", "k3")]


@joint(
    under("algorithm", "adv_estimator norm_adv_by_std_in_grpo gamma lam gigpo.* gdpo_reward_keys gdpo_reward_weights"),
    always=True,
)
def _estimator(t: Translation) -> None:
    key, std, mode = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo", "algorithm.gigpo.mode"
    name = str(t.get(key)).rpartition(".")[2].casefold()
    t.put("nodes.advantage.op", "advantage")
    if name == "gdpo" and _rewards(t):
        t.write("nodes.advantage.estimator", name, key)
        return
    if name not in _ESTIMATORS:
        known = ", ".join(dict.fromkeys(_ESTIMATORS.values()))
        t.put("nodes.advantage.estimator", "grpo")
        reason = f"estimators are {known}, or your own (docs/your_own.md)"
        if name == "gdpo":
            reason = "gdpo needs the names of its rewards in gdpo_reward_keys"
        t.refuse(f"{reason}; grpo is used instead", key)
        return
    t.write("nodes.advantage.estimator", _ESTIMATORS[name], key, note=_difference(t, name))
    if name == "gigpo":
        # The estimator of verl-agent, which has a row for each turn.
        t.put("nodes.advantage.mean_over", "turns")
        t.copy("algorithm.gigpo.step_advantage_w", "nodes.advantage.step_coef")
        t.copy("algorithm.gamma", "nodes.advantage.gamma")
    if name == "gigpo" and t.given(mode):
        t.write("nodes.advantage.normalize_by_std", t.get(mode) == "mean_std_norm", mode)
    elif name in ("grpo", "gigpo", "grpo_vectorized", "grpo_passk"):
        t.copy(std, "nodes.advantage.normalize_by_std")
    for option in ("gamma", "lam"):
        if name == "gae":
            t.copy(f"algorithm.{option}", f"nodes.advantage.{option}")
        elif name == "reinforce_plus_plus" and t.get(f"algorithm.{option}") not in (None, 1):
            t.refuse("returns of reinforce_plus_plus are not discounted", f"algorithm.{option}")
    if name == "remax":
        _greedy(t)
    if _ESTIMATORS[name] == "optimal_token_baseline" and "nodes.old.op" in t.tree:
        # Without the trainer's log-probs (`bypass_mode`) verl refuses it too.
        t.put("nodes.old.statistics", ["prob_square_sum"])


def _rewards(t: Translation) -> bool:
    """Write the names and weights of GDPO's rewards, if they are known; ``score`` is the function's own reward."""
    keys, weights = (f"algorithm.gdpo_reward_{part}" for part in ("keys", "weights"))
    names, factors = t.get(keys), t.get(weights)
    if not isinstance(names, list) or not names:
        return False
    if not isinstance(factors, list) or len(factors) != len(names):
        factors = [1.0] * len(names)
    columns = ["reward" if name == "score" else re.sub(r"\W", "_", str(name)) for name in names]
    t.write("nodes.advantage.rewards", dict(zip(columns, factors, strict=True)), keys, weights)
    return True


def _difference(t: Translation, name: str) -> str:
    """Differences of ``optimal_token_baseline`` from verl's."""
    notes = []
    is_corrected = t.get(f"{CORRECTION}.rollout_is") in ("token", "sequence")
    if _ESTIMATORS[name] == "optimal_token_baseline" and is_corrected:
        notes.append("in verl, the baseline's weights are multiplied by the squared weights of `rollout_is`")
    if name == "optimal_token_baseline" and has_turns(t):
        notes.append("there, tokens of tools count in t; here they do not, as in tir_optimal_token_baseline")
    return "; ".join(notes)


def _greedy(t: Translation) -> None:
    """ReMax compares with the reward of the likeliest response: a second rollout and a second reward."""
    parts.put_node(t, "greedy", "rollout", "generator")
    t.put("nodes.greedy.n", t.tree["nodes.rollout.n"])
    t.put("nodes.greedy.sampling.temperature", 0)
    t.put("nodes.greedy.sampling.max_new_tokens", t.tree["nodes.rollout.sampling.max_new_tokens"])
    t.put("nodes.baseline.op", "reward")
    t.put("nodes.baseline.read_from", ["greedy"])
    t.put("nodes.baseline.write", "baseline_reward")


@joint("algorithm.use_kl_in_reward algorithm.kl_penalty algorithm.kl_ctrl.* algorithm.kl_ctrl")
def _kl_in_reward(t: Translation) -> None:
    control, kind, target = "algorithm.kl_ctrl", "algorithm.kl_penalty", "nodes.advantage.kl_in_reward"
    if not t.flag("algorithm.use_kl_in_reward"):
        return
    t.copy(f"{control}.kl_coef", f"{target}.coef")
    estimator = parts.kl_estimator(t.get(kind))
    if estimator in ("k1", "k2", "k3", "abs"):
        t.write(f"{target}.estimator", estimator, kind)
    else:
        t.refuse("estimators in the reward are k1, k2, k3 and abs", kind)
    if t.get(f"{control}.type") == "adaptive":
        t.write(f"{target}.target_kl", t.get(f"{control}.target_kl"), f"{control}.target_kl", f"{control}.type")
        t.copy(f"{control}.horizon", f"{target}.horizon")


@joint("algorithm.filter_groups.* data.gen_batch_size")
def _filter(t: Translation) -> None:
    prefix = "algorithm.filter_groups"
    metric, rounds = f"{prefix}.metric", f"{prefix}.max_num_gen_batches"
    if not t.flag(f"{prefix}.enable"):
        return
    t.write("nodes.keep.op", "filter", f"{prefix}.enable")
    if t.get(metric) in ("reward", "acc", "score", "seq_reward", None):
        t.imply("rewards of 0 and 1 are the accuracy; `nodes.keep` looks at the reward", metric)
    else:
        t.refuse("`nodes.keep` looks at the reward before penalties", metric)
    t.copy(rounds, "nodes.keep.max_rounds", above=0)
    if "nodes.keep.max_rounds" not in t.tree:
        t.write("nodes.keep.max_rounds", 1000, rounds, note="0 is no bound there")
    t.copy("data.gen_batch_size", "nodes.keep.prompts_per_round")


def _reciprocal(value: float) -> float:
    return float(f"{1 / value:.12g}")


def _bounds(text: Any) -> tuple[float | None, float | None]:
    """Lower and upper bound of ``"0.5_5.0"``; a single number is the upper one."""
    match = re.fullmatch(r"\s*([\d.eE-]+)\s*[_,]\s*([\d.eE-]+)\s*", str(text))
    if match:
        return float(match[1]), float(match[2])
    return (None, float(text)) if isinstance(text, int | float) else (None, None)


@joint(f"{CORRECTION}.*", CORRECTION)
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
    t.copy(veto, f"{target}.rollout_token_veto_threshold", above=0)


def _rejection(t: Translation, key: str, bound: str, target: str) -> None:
    """Criteria and their thresholds, divided by commas; a single threshold applies to all."""
    if t.get(key) is None:
        return
    names, given = ([part.strip() for part in str(t.get(option)).split(",")] for option in (key, bound))
    given = given * len(names) if len(given) == 1 else given
    limits = [_limits(*option) for option in zip(names, given, strict=False)]
    if None in limits or len(names) != len(given) or len(set(names)) != len(names):
        t.refuse("criteria are token_k1 to token_k3, or seq_sum, seq_mean or seq_max of them, with bounds", key, bound)
        return
    criteria, highs, lows = zip(*(option for option in limits if option), strict=True)
    columns = {"rollout_rs": criteria, "rollout_rs_threshold": highs, "rollout_rs_threshold_lower": lows}
    for name, column in columns.items():
        if any(value is not None for value in column):
            source, note = (key, "") if name == "rollout_rs" else (bound, "reciprocals of verl's bounds of k1")
            t.write(f"{target}.{name}", list(column) if len(column) > 1 else column[0], source, note=note)


def _limits(name: str, text: str) -> tuple[str, float, float | None] | None:
    """The criterion, its largest value and its smallest, or None if verl has no such criterion.

    Verl's bounds of k1 apply to the generator's probability over the trainer's, dagrl's to its reciprocal.
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
    _estimator,
    _kl_in_reward,
    _filter,
    _correction,
    to("algorithm.step_advantage_w", "nodes.advantage.step_coef"),
    refused("samples are not drawn again by reward", "algorithm.use_pf_ppo"),
    implied(
        "follows from the estimator",
        "algorithm.pf_ppo* algorithm._target_",
        under(ACTOR, "use_rollout_log_probs calculate_sum_pi_squared sum_pi_squared_checkpointing"),
    ),
)
