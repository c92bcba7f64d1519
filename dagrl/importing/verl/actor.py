"""verl's ``actor_rollout_ref.actor``: the trainer and its update."""

from __future__ import annotations

from dagrl.importing.engines import FSDP
from dagrl.importing.parts import kl_estimator
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Translation, implied, joint, refused, refused_unless, to, under
from dagrl.importing.verl.common import ACTOR, CORRECTION, MEMORY, context_parallel, is_megatron, packed_tokens
from dagrl.importing.verl.engines import layout, megatron_rest, optimizer_rest


def _strategy(t: Translation) -> None:
    t.put("engines.actor.backend", "megatron")
    keys = ("model_engine", f"{ACTOR}.strategy", "--config-name")
    if is_megatron(t):
        t.write("engines.actor.backend", "megatron", *(key for key in keys if t.given(key)))
        return
    t.refuse(FSDP, f"{ACTOR}.strategy", "model_engine")
    t.imply("its keys are read with verl's defaults", "--config-name")


_POLICIES = {
    "vanilla": "ppo_clip",
    "gspo": "gspo",
    "geo_mean": "gmpo",
    "sapo": "sapo",
    "cispo": "cispo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "gpg": "reinforce",
    "cpgd": "cpgd",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "dro": "dro",
}


def _policy(t: Translation) -> None:
    if t.flag(f"{CORRECTION}.bypass_mode") and t.get(f"{CORRECTION}.loss_type") == "reinforce":
        t.write("nodes.update.loss.policy", "reinforce", f"{CORRECTION}.loss_type")
        t.imply_all("has no effect: `rollout_correction.loss_type` takes its place, with `bypass_mode`")
        return
    key = f"{ACTOR}.policy_loss.loss_mode"
    mode = t.get(key)
    drift, own = f"{ACTOR}.policy_drift_coeff", f"{ACTOR}.use_cpgd_loss"
    if t.flag(own):
        mode, key = "cpgd", own
    older = f"{ACTOR}.use_gpg_loss"
    if t.flag(older):
        mode, key = "gpg", older
    if mode == "cpgd" and t.given(drift):
        t.write("nodes.update.loss.drift_coef", t.get(drift), drift)
    if mode not in _POLICIES:
        known = ", ".join(_POLICIES)
        t.refuse(f"losses with a counterpart are {known}; any other is a loss of your own (docs/your_own.md)", key)
        return
    policy = _POLICIES[mode]
    if policy != "ppo_clip" or t.given(key):
        t.write("nodes.update.loss.policy", policy, key)
    if policy in ("clip_cov", "kl_cov"):
        _covariance(t, policy)
    if policy == "sapo":
        for name in ("tau_pos", "tau_neg"):
            t.copy(f"{ACTOR}.{name}", f"nodes.update.loss.{name}")
    if policy == "dro":
        t.copy(f"{ACTOR}.policy_loss.dro_beta", "nodes.update.loss.tau")


def _covariance(t: Translation, policy: str) -> None:
    prefix = f"{ACTOR}.policy_loss"
    t.put("nodes.held.op", "covariance")
    if t.flag(f"{CORRECTION}.bypass_mode"):
        t.put("nodes.held.read", {"old_logprob": "rollout_logprob"})
    t.write("nodes.held.share", t.get(f"{prefix}.{policy}_ratio"), f"{prefix}.{policy}_ratio")
    if policy == "clip_cov":
        keys = (f"{prefix}.clip_cov_lb", f"{prefix}.clip_cov_ub")
        bounds = [t.get(key) for key in keys]
        unknown = next((bound for bound in bounds if isinstance(bound, Unresolved)), None)
        t.write("nodes.held.between", unknown or bounds, *keys)
    else:
        t.write("nodes.update.loss.kl_cov_coef", t.get(f"{prefix}.ppo_kl_coef"), f"{prefix}.ppo_kl_coef")


def _clip(t: Translation) -> None:
    """Bounds of the ratio. ``clip_ratio_low`` and ``_high`` have defaults: ``clip_ratio`` alone has no effect."""
    if t.tree.get("nodes.update.loss.policy") == "reinforce":
        t.imply_all("has no effect on this loss")
        return
    low, high, plain = (f"{ACTOR}.{name}" for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio"))
    bounds = []
    for key in (low, high):
        value = t.get(key)
        bounds.append((t.get(plain, 0.2), plain) if value is None else (value, key))
    (low_value, low_key), (high_value, high_key) = bounds
    policy = t.tree.get("nodes.update.loss.policy", "ppo_clip")
    if policy == "cispo":  # Its weights have no lower bound here, and most scripts set one out of reach.
        if t.number(low_key, 0) >= 1:
            t.imply("bounds nothing, as here", low_key)
        else:
            t.refuse("weights of cispo have an upper bound only", low_key)
    else:
        t.write("nodes.update.loss.clip_ratio", low_value, low_key)
    if high_value != low_value or t.given(high_key) or policy == "cispo":
        t.write("nodes.update.loss.clip_ratio_high", high_value, high_key)
    if plain not in (low_key, high_key):
        reason = (
            f"has no effect in verl: `clip_ratio_low` {low_value} and `clip_ratio_high` {high_value} take its place"
        )
        t.imply(reason, plain)
    dual = f"{ACTOR}.clip_ratio_c"
    if policy in ("ppo_clip", "dppo_tv", "dppo_kl"):
        target = "dual_clip" if policy == "ppo_clip" else "ratio_cap"
        t.write(f"nodes.update.loss.{target}", t.get(dual), dual)
    else:
        t.imply("has no effect on this loss", dual)


def _aggregation(t: Translation) -> None:
    key = f"{ACTOR}.loss_agg_mode"
    mode = t.get(key)
    policy = t.tree.get("nodes.update.loss.policy")
    if policy in ("gmpo", "sapo"):
        t.imply("has no effect on this loss, a mean over responses", key)
        t.put("nodes.update.loss.aggregation", "seq-mean-token-mean")
    elif policy == "gspo" and mode != "seq-mean-token-mean":
        why = "verl 0.9.1 takes this one, its main branch always seq-mean-token-mean, which stands in"
        t.put("nodes.update.loss.aggregation", "seq-mean-token-mean")
        t.note(key, "nodes.update.loss.aggregation", why, mode)
    elif mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        t.write("nodes.update.loss.aggregation", mode, key)
    else:
        t.refuse("aggregations are token-mean and seq-mean-token-mean, -sum and -sum-norm", key)
    scale = f"{ACTOR}.loss_scale_factor"
    if t.get(scale) in (None, t.tree.get("nodes.rollout.sampling.max_new_tokens")):
        t.imply("the divisor is `max_new_tokens`", scale)
    else:
        t.refuse("the divisor of seq-mean-token-sum-norm is `max_new_tokens`", scale)


def _kl(t: Translation) -> None:
    use, coef, kind = (f"{ACTOR}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))
    if not t.flag(use):
        t.imply("there is no divergence in the loss", use, coef, kind)
        return
    estimator = kl_estimator(t.get(kind))
    t.write("nodes.update.loss.kl_coef", t.get(coef), coef)
    t.imply("`kl_coef` above 0 switches it on", use)
    if estimator is None:
        t.refuse("estimators are k1, k2, k3 and abs, with or without +", kind)
    else:
        t.write("nodes.update.loss.kl_estimator", estimator, kind)


def _update_tokens(t: Translation) -> None:
    parallel = context_parallel(t, ACTOR)
    packed_tokens(
        t, "nodes.update.tokens_per_micro_batch", ACTOR, "ppo_", parallel, dynamic_key=f"{ACTOR}.use_dynamic_bsz"
    )


def _tis(t: Translation) -> None:
    key = f"{ACTOR}.tis_imp_ratio_cap"
    if t.number(key, -1) > 0:
        t.write("nodes.update.rollout_correction.rollout_is", "token", key)
        t.write("nodes.update.rollout_correction.rollout_is_threshold", t.get(key), key)
    else:
        t.imply("there is no correction, as by default", key)


ENGINE = (
    joint(_strategy, "model_engine --config-name", under(ACTOR, "strategy"), always=True),
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
    joint(
        _policy,
        under(
            ACTOR, "policy_loss.* tau_pos tau_neg use_cpgd_loss use_gpg_loss policy_drift_coeff policy_loss.loss_mode"
        ),
        always=True,
    ),
    joint(_clip, under(ACTOR, "clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c"), always=True),
    joint(_aggregation, under(ACTOR, "loss_agg_mode loss_scale_factor"), always=True),
    to(f"{ACTOR}.entropy_coeff", "nodes.update.loss.entropy_coef", write_default=True),
    joint(_kl, under(ACTOR, "use_kl_loss kl_loss_coef kl_loss_type")),
    joint(
        _update_tokens,
        under(ACTOR, "ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu ppo_micro_batch_size use_dynamic_bsz"),
    ),
    joint(_tis, under(ACTOR, "tis_imp_ratio_cap")),
    to(f"{ACTOR}.checkpoint.async_save", "run.async_save"),
    to(
        f"{ACTOR}.freeze_vision_tower",
        "engines.actor.freeze",
        convert=lambda frozen: ["vision"] if frozen else [],
    ),
    refused(FSDP, under(ACTOR, "fsdp_config.*")),
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
