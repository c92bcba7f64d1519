"""ROLL's advantages, loss, divergence and correction."""

from __future__ import annotations

import re

from dagrl.importing.parts import put_logprob, put_node, put_reference
from dagrl.importing.roll.common import TRAIN
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Translation, joint, under

_KL = {"kl": "k1", "abs": "abs", "mse": "k2"}


def _estimator(t: Translation) -> None:
    """``reinforce`` with whitening is REINFORCE++; with means of groups it is its baseline form, or Dr. GRPO."""
    key, whiten, mean, std = "adv_estimator", "whiten_advantages", "norm_mean_type", "norm_std_type"
    name, whitened, grouped = t.get(key), t.flag(whiten), t.get(mean) == "group"
    t.put("nodes.advantage.op", "advantage")
    target = "nodes.advantage.estimator"
    if name == "gae":
        t.write(target, "gae", key)
        for option, field in (("gamma", "gamma"), ("lambd", "lam")):
            t.write(f"nodes.advantage.{field}", t.get(option), option)
        t.imply("advantages of gae are always whitened", whiten)
    elif name == "grpo":
        t.write(target, "grpo", key)
        if whitened:
            t.refuse("advantages of grpo are not whitened: an estimator of your own (docs/your_own.md)", whiten)
        t.imply("is grpo's own", mean, std)
    elif name == "reinforce" and (whitened or grouped) and t.get(std) in (None, "null"):
        form = ("reinforce_plus_plus_baseline" if grouped else "reinforce_plus_plus") if whitened else "dr_grpo"
        t.write(target, form, *(each for each in (key, whiten, mean) if t.given(each) and t.get(each) is not None))
        t.imply("nothing is divided by a deviation of rewards", std)
    elif name == "reinforce" and grouped and t.get(std) == "group" and not whitened:
        t.write(target, "grpo", key, mean, std)
    else:
        t.put(target, "reinforce_plus_plus")
        t.refuse("has no counterpart: an estimator of your own (docs/your_own.md); reinforce_plus_plus stands in", key)
        t.refuse("has no counterpart with this estimator", *(each for each in (mean, std) if t.get(each) is not None))
    t.imply("is null or off, as by default", *(each for each in (whiten, mean, std) if t.get(each) in (None, False)))
    rest = [each for each in ("gamma", "lambd", whiten, mean, std) if t.given(each) and not t.is_recorded(each)]
    t.imply("has no effect on this estimator", *rest)


def _loss(t: Translation) -> None:
    put_node(t, "update", "update", "actor")
    clip = "pg_clip"
    if t.flag("use_pg_clip_range"):
        t.write("nodes.update.loss.clip_ratio", t.get("pg_clip_low"), "pg_clip_low", "use_pg_clip_range")
        t.write("nodes.update.loss.clip_ratio_high", t.get("pg_clip_high"), "pg_clip_high")
    else:
        t.write("nodes.update.loss.clip_ratio", t.get(clip), clip)
    if t.flag("dual_clip_loss"):
        bound = float(f"{1 + 2 * t.number(clip, 0.2):.12g}")
        t.write("nodes.update.loss.dual_clip", bound, "dual_clip_loss", note="1 + 2 pg_clip")
    if t.get("importance_sampling") == "seq":
        t.write("nodes.update.loss.policy", "gspo", "importance_sampling")
    variant = f"{TRAIN}.pg_variant"
    policies = {"ppo": "ppo_clip", "vanilla": "reinforce", "topr": "topr", "cispo": "cispo", "kimi15": "opmd_kimi"}
    if t.get(variant) in policies:
        t.write("nodes.update.loss.policy", policies[t.get(variant)], variant)
    else:
        t.refuse("losses with a counterpart are ppo, vanilla, topr, cispo and kimi15", variant)
    t.write("nodes.update.loss.entropy_coef", t.get("entropy_loss_coef"), "entropy_loss_coef")
    mode = t.get("loss_agg_mode")
    t.write("nodes.update.loss.aggregation", mode, "loss_agg_mode")


def _divergence(t: Translation) -> None:
    if t.flag("use_kl_loss"):
        t.write("nodes.update.loss.kl_coef", t.get("kl_loss_coef"), "kl_loss_coef", "use_kl_loss")
        t.write("nodes.update.loss.kl_estimator", "k3", "use_kl_loss")
    else:
        t.imply("there is no divergence in the loss", "use_kl_loss", "kl_loss_coef")
    keys = ("init_kl_coef", "kl_penalty", "target_kl", "kl_horizon")
    if t.flag("add_token_level_kl"):
        target = "nodes.advantage.kl_in_reward"
        t.write(f"{target}.coef", t.get("init_kl_coef"), "init_kl_coef", "add_token_level_kl")
        if t.get("kl_penalty") in _KL:
            t.write(f"{target}.estimator", _KL[t.get("kl_penalty")], "kl_penalty")
        else:
            t.refuse("estimators in the reward are k1, k2, k3 and abs", "kl_penalty")
        if t.number("target_kl"):
            t.write(f"{target}.target_kl", t.get("target_kl"), "target_kl")
            t.write(f"{target}.horizon", t.get("kl_horizon"), "kl_horizon")
    else:
        t.imply("there is no divergence in the reward", "add_token_level_kl", *keys)
    put_logprob(t, "old", "actor", "old_logprob")
    put_reference(t)


def _correction(t: Translation) -> None:
    prefix = "train_infer_correction"
    weight = f"{prefix}.is_weight"
    target = "nodes.update.rollout_correction"
    if t.flag(f"{weight}.enabled"):
        kind = f"{weight}.weight_type"
        if t.get(kind) in ("token", "sequence"):
            t.write(f"{target}.rollout_is", t.get(kind), kind, f"{weight}.enabled")
            t.write(f"{target}.rollout_is_threshold", t.get(f"{weight}.upper_bound"), f"{weight}.upper_bound")
        else:
            t.refuse("weights are of tokens or of sequences", kind, f"{weight}.enabled")
    found = (re.match(rf"{prefix}\.filters\.\d+", key) for key in t.current)
    filters = dict.fromkeys(match[0] for match in found if match)
    kept = []
    for each in filters:
        if not t.flag(f"{each}.enabled"):
            continue
        by_ratio = t.get(f"{each}.agg_type", "token") in ("token", "sequence", "geometric")
        if by_ratio and not t.flag(f"{each}.diff_enabled") and t.get(f"{each}.ratio_enabled", True) is True:
            kept.append(each)
        else:
            reason = "responses are rejected by ratio alone, of tokens or responses"
            t.refuse(reason, *(key for key in t.current if key.startswith(f"{each}.")))
    for option, name, default in (
        ("rollout_rs", "agg_type", "token"),
        ("rollout_rs_threshold", "ratio_high", 1.2),
        ("rollout_rs_threshold_lower", "ratio_low", 0.8),
    ):
        if kept:
            values = [t.get(f"{each}.{name}", default) for each in kept]
            unknown = next((value for value in values if isinstance(value, Unresolved)), None)
            keys = [f"{each}.{key}" for each in kept for key in (name, "enabled")]
            t.write(f"{target}.{option}", unknown or (values if len(kept) > 1 else values[0]), *keys)
    t.imply("is off, or has no effect", *(key for key in t.current if not t.is_recorded(key)))


RULES = (
    joint(_estimator, "adv_estimator whiten_advantages norm_mean_type norm_std_type gamma lambd", always=True),
    joint(
        _loss,
        "pg_clip use_pg_clip_range pg_clip_low pg_clip_high dual_clip_loss importance_sampling "
        "entropy_loss_coef loss_agg_mode",
        under(TRAIN, "pg_variant"),
        always=True,
    ),
    joint(
        _divergence,
        "use_kl_loss kl_loss_coef add_token_level_kl init_kl_coef kl_penalty target_kl kl_horizon",
        always=True,
    ),
)
CORRECTION = (joint(_correction, "train_infer_correction.*"),)
