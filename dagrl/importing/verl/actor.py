"""verl's ``actor_rollout_ref.actor``: the trainer and its update."""

from __future__ import annotations

from dagrl.importing import engines, parts
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Translation, implied, joint, refused, refused_unless, to, under
from dagrl.importing.verl.common import ACTOR, CORRECTION, MEMORY, context_parallel, is_megatron, packed_tokens
from dagrl.importing.verl.engines import layout, megatron_rest, optimizer_rest

_LOSS = "nodes.update.loss"


@joint("model_engine --config-name", under(ACTOR, "strategy"), always=True)
def _strategy(t: Translation) -> None:
    t.put("engines.actor.backend", "megatron")
    keys = ("model_engine", f"{ACTOR}.strategy", "--config-name")
    if is_megatron(t):
        t.write("engines.actor.backend", "megatron", *(key for key in keys if t.given(key)))
        return
    t.refuse(engines.FSDP, f"{ACTOR}.strategy", "model_engine")
    t.imply("its keys are read with verl's defaults", "--config-name")


_POLICIES = {
    "vanilla": "ppo_clip",
    "geo_mean": "gmpo",
    "gpg": "reinforce",
    **{name: name for name in ("gspo", "sapo", "cispo", "clip_cov", "kl_cov", "cpgd", "dppo_tv", "dppo_kl", "dro")},
}


@joint(
    under(ACTOR, "policy_loss.* tau_pos tau_neg use_cpgd_loss use_gpg_loss policy_drift_coeff policy_loss.loss_mode"),
    always=True,
)
def _policy(t: Translation) -> None:
    prefix = f"{ACTOR}.policy_loss"
    if t.flag(f"{CORRECTION}.bypass_mode") and t.get(f"{CORRECTION}.loss_type") == "reinforce":
        t.write(f"{_LOSS}.policy", "reinforce", f"{CORRECTION}.loss_type")
        return
    key = f"{prefix}.loss_mode"
    mode = t.get(key)
    for older in ("cpgd", "gpg"):
        if t.flag(f"{ACTOR}.use_{older}_loss"):
            mode, key = older, f"{ACTOR}.use_{older}_loss"
    if mode not in _POLICIES:
        known = ", ".join(_POLICIES)
        t.refuse(f"losses with a counterpart are {known}; write your own loss for others (docs/your_own.md)", key)
        return
    policy = _POLICIES[mode]
    if policy != "ppo_clip" or t.given(key):
        t.write(f"{_LOSS}.policy", policy, key)
    match policy:
        case "cpgd":
            t.copy(f"{ACTOR}.policy_drift_coeff", f"{_LOSS}.drift_coef")
        case "sapo":
            t.copy(f"{ACTOR}.tau_pos", f"{_LOSS}.tau_pos")
            t.copy(f"{ACTOR}.tau_neg", f"{_LOSS}.tau_neg")
        case "dro":
            t.copy(f"{prefix}.dro_beta", f"{_LOSS}.tau")
        case "clip_cov" | "kl_cov":
            _covariance(t, policy)


def _covariance(t: Translation, policy: str) -> None:
    prefix = f"{ACTOR}.policy_loss"
    t.put("nodes.held.op", "covariance")
    if t.flag(f"{CORRECTION}.bypass_mode"):
        t.put("nodes.held.read", {"old_logprob": "rollout_logprob"})
    t.copy(f"{prefix}.{policy}_ratio", "nodes.held.share")
    if policy == "kl_cov":
        t.copy(f"{prefix}.ppo_kl_coef", f"{_LOSS}.kl_cov_coef")
        return
    keys = (f"{prefix}.clip_cov_lb", f"{prefix}.clip_cov_ub")
    bounds = [t.get(key) for key in keys]
    unknown = next((bound for bound in bounds if isinstance(bound, Unresolved)), None)
    t.write("nodes.held.between", unknown or bounds, *keys)


@joint(under(ACTOR, "clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c"), always=True)
def _clip(t: Translation) -> None:
    """Bounds of the ratio. ``clip_ratio_low`` and ``_high`` have defaults: ``clip_ratio`` alone has no effect."""
    policy, plain = t.tree.get(f"{_LOSS}.policy", "ppo_clip"), f"{ACTOR}.clip_ratio"
    if policy == "reinforce":
        return
    low, high = (key if t.get(key) is not None else plain for key in (f"{plain}_low", f"{plain}_high"))
    if policy != "cispo":
        t.copy(low, f"{_LOSS}.clip_ratio", 0.2)
    else:
        parts.refuse_lower_bound(t, t.number(low, 0.2), low)
    if t.get(high, 0.2) != t.get(low, 0.2) or t.given(high) or policy == "cispo":
        t.copy(high, f"{_LOSS}.clip_ratio_high", 0.2)
    if plain not in (low, high):
        t.imply("has no effect in verl: `clip_ratio_low` and `clip_ratio_high` take its place", plain)
    if policy == "ppo_clip":
        t.copy(f"{plain}_c", f"{_LOSS}.dual_clip")
    elif policy in ("dppo_tv", "dppo_kl"):
        t.copy(f"{plain}_c", f"{_LOSS}.ratio_cap")


@joint(under(ACTOR, "loss_agg_mode loss_scale_factor"), always=True)
def _aggregation(t: Translation) -> None:
    key, scale, target = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor", f"{_LOSS}.aggregation"
    mode, policy = t.get(key), t.tree.get(f"{_LOSS}.policy")
    if policy in ("gmpo", "sapo"):
        t.imply("has no effect on this loss, a mean over responses", key)
        t.put(target, "seq-mean-token-mean")
    elif policy == "gspo" and mode != "seq-mean-token-mean":
        why = "verl 0.9.1 takes this one, its main branch always seq-mean-token-mean, which is used instead"
        t.put(target, "seq-mean-token-mean")
        t.note(key, target, why, mode)
    elif mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        t.copy(key, target)
    else:
        t.refuse("aggregations are token-mean and seq-mean-token-mean, -sum and -sum-norm", key)
    if t.get(scale) not in (None, t.tree.get("nodes.rollout.sampling.max_new_tokens")):
        t.refuse("the divisor of seq-mean-token-sum-norm is `max_new_tokens`", scale)


@joint(under(ACTOR, "use_kl_loss kl_loss_coef kl_loss_type"))
def _kl(t: Translation) -> None:
    kind = f"{ACTOR}.kl_loss_type"
    if not t.flag(f"{ACTOR}.use_kl_loss"):
        return
    t.copy(f"{ACTOR}.kl_loss_coef", f"{_LOSS}.kl_coef")
    if estimator := parts.kl_estimator(t.get(kind)):
        t.write(f"{_LOSS}.kl_estimator", estimator, kind)
    else:
        t.refuse("estimators are k1, k2, k3 and abs, with or without +", kind)


@joint(under(ACTOR, "ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu ppo_micro_batch_size use_dynamic_bsz"))
def _update_tokens(t: Translation) -> None:
    target, dynamic = "nodes.update.tokens_per_micro_batch", f"{ACTOR}.use_dynamic_bsz"
    packed_tokens(t, target, ACTOR, "ppo_", context_parallel(t, ACTOR), dynamic_key=dynamic)


@joint(under(ACTOR, "tis_imp_ratio_cap"))
def _tis(t: Translation) -> None:
    key, target = f"{ACTOR}.tis_imp_ratio_cap", "nodes.update.rollout_correction"
    if t.number(key, -1) > 0:
        t.write(f"{target}.rollout_is", "token", key)
        t.copy(key, f"{target}.rollout_is_threshold")


ENGINE = (
    _strategy,
    layout(ACTOR, "actor"),
    implied(
        "`sleep: auto` offloads while another engine of the group works",
        *(under(section, "*param_offload *grad_offload *optimizer_offload") for section in (ACTOR, "critic")),
    ),
    *megatron_rest(ACTOR, "actor"),
)
UPDATE = (
    to(f"{ACTOR}.ppo_mini_batch_size", "nodes.update.mini_batch", write_default=True, note="prompts in both"),
    to(f"{ACTOR}.ppo_epochs", "nodes.update.epochs"),
    _policy,
    _clip,
    _aggregation,
    to(f"{ACTOR}.entropy_coeff", f"{_LOSS}.entropy_coef", write_default=True),
    _kl,
    _update_tokens,
    _tis,
    to(f"{ACTOR}.checkpoint.async_save", "run.async_save"),
    to(f"{ACTOR}.freeze_vision_tower", "engines.actor.freeze", convert=lambda frozen: ["vision"] if frozen else []),
    refused(engines.FSDP, under(ACTOR, "fsdp_config.*")),
    refused_unless(False, "mini-batches follow the order of the samples", under(ACTOR, "shuffle")),
    implied(
        MEMORY, under(ACTOR, "use_torch_compile entropy_* use_remove_padding use_fused_kernels use_prefix_grouper")
    ),
    implied(
        "is measured or saved by itself",
        under(ACTOR, "calculate_* checkpoint.* data_loader_seed load_weight rollout_n _target_"),
    ),
    refused("is `profile` of the pipeline (docs/profiling.md)", under(ACTOR, "profile*")),
    optimizer_rest(ACTOR),
)
