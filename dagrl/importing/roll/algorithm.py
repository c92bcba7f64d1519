"""ROLL's algorithm and rewards, and the keys without a counterpart."""

from __future__ import annotations

import re

from dagrl.importing import parts
from dagrl.importing.roll.common import TRAIN, is_pure_opd
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Translation, implied, joint, refused, refused_unless, to, under

_LOSS = "nodes.update.loss"
_KL = {"kl": "k1", "abs": "abs", "mse": "k2"}


@joint("adv_estimator whiten_advantages norm_mean_type norm_std_type gamma lambd", always=True)
def _estimator(t: Translation) -> None:
    """``reinforce`` with whitening is REINFORCE++; with means of groups it is its baseline form, or Dr. GRPO."""
    key, whiten, mean, std = "adv_estimator", "whiten_advantages", "norm_mean_type", "norm_std_type"
    name, whitened, grouped, by_std = t.get(key), t.flag(whiten), t.get(mean) == "group", t.get(std)
    target = "nodes.advantage.estimator"
    t.put("nodes.advantage.op", "advantage")
    t.put(target, "none" if is_pure_opd(t) else "reinforce_plus_plus")
    if is_pure_opd(t):
        if whitened:
            t.refuse("advantages of a teacher alone are not whitened", whiten)
    elif name == "gae":
        t.write(target, "gae", key)
        t.copy("gamma", "nodes.advantage.gamma")
        t.copy("lambd", "nodes.advantage.lam")
    elif name == "grpo":
        t.write(target, "grpo", key)
        if whitened:
            t.refuse("advantages of grpo are not whitened; write your own estimator (docs/your_own.md)", whiten)
    elif name == "reinforce" and (whitened or grouped) and by_std in (None, "null"):
        form = ("reinforce_plus_plus_baseline" if grouped else "reinforce_plus_plus") if whitened else "dr_grpo"
        t.write(target, form, *(option for option in (key, whiten, mean) if t.settings.value(option) is not None))
    elif name == "reinforce" and grouped and by_std in ("group", "batch") and not whitened:
        t.write(target, "grpo", key, mean)
        t.copy(std, "nodes.advantage.normalize_by_std")
    elif name == "agentic_reinforce" and whitened and t.get(mean) is None and by_std is None:
        t.write(target, name, key, whiten)
        t.copy("gamma", "nodes.advantage.gamma")
    else:
        t.refuse(
            "has no counterpart; write your own estimator (docs/your_own.md); reinforce_plus_plus is used instead", key
        )
        given = (option for option in (mean, std) if t.get(option) is not None)
        t.refuse("has no counterpart with this estimator", *given)


@joint("use_pg_clip_range pg_clip pg_clip_low pg_clip_high dual_clip_loss importance_sampling", always=True)
def _clip(t: Translation) -> None:
    parts.put_node(t, "update", "update", "actor")
    if t.flag("use_pg_clip_range"):
        t.write(f"{_LOSS}.clip_ratio", t.get("pg_clip_low"), "pg_clip_low", "use_pg_clip_range")
        t.copy("pg_clip_high", f"{_LOSS}.clip_ratio_high")
    else:
        t.copy("pg_clip", f"{_LOSS}.clip_ratio")
    if t.flag("dual_clip_loss"):
        bound = float(f"{1 + 2 * t.number('pg_clip', 0.2):.12g}")
        t.write(f"{_LOSS}.dual_clip", bound, "dual_clip_loss", note="1 + 2 pg_clip")
    if t.get("importance_sampling") == "seq":
        t.write(f"{_LOSS}.policy", "gspo", "importance_sampling")


_POLICIES = {
    "ppo": "ppo_clip",
    "vanilla": "reinforce",
    "topr": "topr",
    "tis": "cispo",
    "cispo": "cispo",
    "kimi15": "dro",
}


@joint(
    under(TRAIN, "pg_variant kimi15_tau cispo_epsilon_low cispo_epsilon_high cispo_use_unified_mask"),
    under(TRAIN, "tis_lower_bound tis_upper_bound"),
)
def _variant(t: Translation) -> None:
    variant, high = f"{TRAIN}.pg_variant", f"{_LOSS}.clip_ratio_high"
    t.choose(variant, f"{_LOSS}.policy", _POLICIES, f"losses with a counterpart are {', '.join(_POLICIES)}")
    if t.tree.get(f"{_LOSS}.policy") == "cispo":
        for bound in (f"{_LOSS}.clip_ratio", high):
            t.drop(bound, "weights have bounds of their own")
    match t.get(variant):
        case "kimi15":
            t.copy(f"{TRAIN}.kimi15_tau", f"{_LOSS}.tau", 0.1)
        case "cispo":
            low = f"{TRAIN}.cispo_epsilon_low"
            t.copy(f"{TRAIN}.cispo_epsilon_high", high, 0.1)
            parts.refuse_lower_bound(t, t.number(low, 0.1), low, variant)
            if t.flag(mask := f"{TRAIN}.cispo_use_unified_mask"):
                t.refuse("every token keeps its gradient", mask)
        case "tis":
            low, upper = (f"{TRAIN}.tis_{end}_bound" for end in ("lower", "upper"))
            # A bound of 1 is no valid one here; this is 1 in float32.
            t.write(high, max(1e-9, float(f"{t.number(upper, 1.0) - 1:.12g}")), upper, note="1 + this is the bound")
            parts.refuse_lower_bound(t, 1 - t.number(low, 0.0), low)


@joint("use_kl_loss kl_loss_coef add_token_level_kl init_kl_coef kl_penalty target_kl kl_horizon", always=True)
def _divergence(t: Translation) -> None:
    parts.put_logprob(t, "old", "actor", "old_logprob")
    if is_pure_opd(t):
        return
    if t.flag("use_kl_loss"):
        t.write(f"{_LOSS}.kl_coef", t.get("kl_loss_coef"), "kl_loss_coef", "use_kl_loss")
        t.write(f"{_LOSS}.kl_estimator", "k3", "use_kl_loss")
    if t.flag("add_token_level_kl"):
        target = "nodes.advantage.kl_in_reward"
        t.write(f"{target}.coef", t.get("init_kl_coef"), "init_kl_coef", "add_token_level_kl")
        t.choose("kl_penalty", f"{target}.estimator", _KL, "estimators in the reward are k1, k2, k3 and abs")
        if t.number("target_kl"):
            t.copy("target_kl", f"{target}.target_kl")
            t.copy("kl_horizon", f"{target}.horizon")
    parts.put_reference(t)


@joint("train_infer_correction.*")
def correction(t: Translation) -> None:
    prefix, target = "train_infer_correction", "nodes.update.rollout_correction"
    weight = f"{prefix}.is_weight"
    if t.flag(f"{weight}.enabled"):
        kind = f"{weight}.weight_type"
        if t.get(kind) in ("token", "sequence"):
            t.write(f"{target}.rollout_is", t.get(kind), kind, f"{weight}.enabled")
            t.copy(f"{weight}.upper_bound", f"{target}.rollout_is_threshold")
        else:
            t.refuse("weights are of tokens or of sequences", kind, f"{weight}.enabled")
    matches = (re.match(rf"{prefix}\.filters\.\d+", key) for key in t.current)
    filters = dict.fromkeys(match[0] for match in matches if match)
    kept = []
    for section in (section for section in filters if t.flag(f"{section}.enabled")):
        by_ratio = t.get(f"{section}.agg_type", "token") in ("token", "sequence", "geometric")
        if by_ratio and not t.flag(f"{section}.diff_enabled") and t.get(f"{section}.ratio_enabled", True) is True:
            kept.append(section)
        else:
            t.refuse("responses are rejected by ratio alone, of tokens or responses", *t.below(section))
    for option, name, default in (
        ("rollout_rs", "agg_type", "token"),
        ("rollout_rs_threshold", "ratio_high", 1.2),
        ("rollout_rs_threshold_lower", "ratio_low", 0.8),
    ):
        if kept:
            values = [t.get(f"{section}.{name}", default) for section in kept]
            unknown = next((value for value in values if isinstance(value, Unresolved)), None)
            keys = [f"{section}.{key}" for section in kept for key in (name, "enabled")]
            t.write(f"{target}.{option}", unknown or (values if len(kept) > 1 else values[0]), *keys)


ALGORITHM = (
    _estimator,
    _clip,
    _variant,
    to("entropy_loss_coef", f"{_LOSS}.entropy_coef", write_default=True),
    to("loss_agg_mode", f"{_LOSS}.aggregation", write_default=True),
    _divergence,
)


_REWARDS = {"MathRuleRewardWorker": "math", "CodeSandboxRewardWorker": "code"}


@joint("rewards.* rewards", always=True)
def reward(t: Translation) -> None:
    names = list(dict.fromkeys(key.split(".")[1] for key in t.below("rewards")))
    workers = {name: str(t.get(f"rewards.{name}.worker_cls", "")).rpartition(".")[2] for name in names}
    chosen = next((name for name in names if workers[name] in _REWARDS), None)
    t.put("nodes.reward.op", "reward")
    t.put("nodes.reward.fn", "math")
    if chosen:
        t.write("nodes.reward.fn", _REWARDS[workers[chosen]], f"rewards.{chosen}.worker_cls")
        _query_filter(t, f"rewards.{chosen}.query_filter_config")
        t.imply("rewards are computed on the host, of all rows", *t.below(f"rewards.{chosen}"))
    else:
        key = f"rewards.{names[0]}.worker_cls" if names else "rewards"
        t.note(key, "nodes.reward.fn", "set `fn`, or a node {op: judge} (docs/rewards.md); math is used instead")
    several = "write one reward function for all domains, by `data_source` (docs/rewards.md)"
    t.refuse(several if len(names) > 1 else "a judge is a node {op: judge} (docs/rewards.md)", *t.rest())


def _query_filter(t: Translation, prefix: str) -> None:
    kind, arguments = f"{prefix}.type", f"{prefix}.filter_args"
    if t.get(kind) in ("mean_filter", "std_filter"):
        t.write("nodes.keep.op", "filter", kind)
    if t.get(kind) == "mean_filter":
        t.copy(f"{arguments}.threshold_down", "nodes.keep.lower")
        t.copy(f"{arguments}.threshold_up", "nodes.keep.upper")
    elif t.get(kind) == "std_filter":
        t.copy(f"{arguments}.std_threshold", "nodes.keep.min_std")


REST = (
    refused(
        "rewards and advantages are not clipped; write your own estimator (docs/your_own.md)",
        "reward_clip advantage_clip",
    ),
    refused_unless(False, "exclude them with your own mask (docs/migration.md)", "max_len_mask error_max_len_clip"),
    refused_unless(
        False, "groups are replaced, never masked: `nodes.keep` with `lower` and `upper`", "difficulty_mask"
    ),
    refused_unless(
        (False, 1),
        "has no counterpart in the loss",
        "difficulty_loss_weight length_loss_weight use_topr_neg_loss_coef rl_loss_coef reward_shift reward_scale",
    ),
    refused("is the `weight` of a source in `data.train`", "*.domain_interleave_probs* *.interleave_probs"),
    refused_unless(1, "samples are drawn, without beams", "*.num_beams"),
    refused(
        "write your own classes for environments and agents (docs/multi_turn.md)",
        "custom_envs* *env_manager* *_env_* env_* max_tokens_per_step max_actions_per_traj "
        "reward_normalization* *.max_env_num_per_worker",
    ),
    refused("is `profile` of the pipeline (docs/profiling.md)", "profiler_* *profiler*"),
    implied(
        "follows from the pipeline and the model",
        "*.model_args.* *.data_args.* *.training_args.* *.world_size *.worker_cls *.use_remove_padding "
        "*.offload_nccl *.generating_args.* *.system_envs* *.name global_template "
        "difficulty_low_threshold difficulty_high_threshold val_* *old_logprobs_recompute "
        "model_download_type reward_model*",
    ),
    implied("`sleep: auto` offloads while another engine of the group works", "offload_*"),
    implied(
        "is `dagrl run --run-dir DIR`",
        "output_dir logging_dir checkpoint_config* rollout_dump_dir resume_from_checkpoint",
    ),
    refused("trackers read their own environment", "tracker_kwargs*"),
    implied(
        "belongs to the launch",
        "hydra* defaults* logging_steps system_envs* generate_opt_level is_num_return_sequences_expand "
        "max_running_requests rollout_mock*",
    ),
)
