"""verl's ``actor_rollout_ref.model``, ``.actor`` and ``.ref``: the trainer, its update and its reference."""

from __future__ import annotations

from typing import Any

from dagrl.importing.parts import is_known, library_field, library_fields, put_reference
from dagrl.importing.table import Rule, Translation, implied, joint, refused, refused_unless, to
from dagrl.importing.verl.common import (
    ACTOR,
    FSDP,
    MEMORY,
    MODEL,
    REF,
    context_parallel,
    has_own_rollout_nodes,
    is_megatron,
    packed_tokens,
)

_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_LAYERS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "linear_qkv"),
    "o_proj": "linear_proj",
    **dict.fromkeys(("gate_proj", "up_proj"), "linear_fc1"),
    "down_proj": "linear_fc2",
}
PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
OFFLOAD = {"param_offload": "param", "grad_offload": "grad", "optimizer_offload": "optimizer"}


def _strategy(t: Translation) -> None:
    t.put("engines.actor.backend", "megatron")
    keys = ("model_engine", f"{ACTOR}.strategy", "--config-name")
    if is_megatron(t):
        t.write("engines.actor.backend", "megatron", *(key for key in keys if t.given(key)))
        return
    t.refuse(FSDP, f"{ACTOR}.strategy", "model_engine")
    t.imply("its keys are read with verl's defaults", "--config-name")


def layout(section: str, engine: str) -> Rule:
    """Megatron's sizes of a section, and Ulysses' sequence parallelism with FSDP."""
    keys = [f"{section}.megatron.{size}" for size in PARALLEL]
    ulysses = (f"{section}.ulysses_sequence_parallel_size", f"{section}.fsdp_config.ulysses_sequence_parallel_size")
    sequence = f"{section}.megatron.sequence_parallel"

    def apply(t: Translation) -> None:
        if engine not in _engines(t):
            t.imply_all("there is no critic with this estimator")
            return
        if not is_megatron(t):
            ranks = context_parallel(t, section)
            if ranks > 1:
                target = f"engines.{engine}.parallel.context_parallel_size"
                t.write(target, ranks, *ulysses, note="Ulysses' sequence parallelism is Megatron's context parallelism")
            t.imply("is 1, as by default", *(key for key in ulysses if t.get(key) == 1))
            t.imply("has no effect with FSDP", *keys, sequence)
            return
        for key, size in zip(keys, PARALLEL, strict=True):
            if t.given(key) and is_known(t.get(key)):
                t.write(f"engines.{engine}.parallel.{size}", t.get(key), key)
            elif t.given(key):
                t.imply("is null, as by default", key)
        tensor = t.number(keys[0], 1)
        if tensor > 1:
            t.write(f"engines.{engine}.parallel.sequence_parallel", t.get(sequence), sequence)
            if t.number(keys[4], 1) > 1 and not is_known(t.get(keys[5])):
                # In Megatron, and so in verl, experts are split like the other matrices unless this is set.
                t.write(f"engines.{engine}.parallel.expert_tensor_parallel_size", tensor, keys[5])
        t.imply("has no effect without tensor parallelism", sequence)
        t.refuse("has no effect with Megatron: `megatron.context_parallel_size` has", *ulysses)

    return joint(apply, *keys, sequence, *ulysses, targets=(f"engines.{engine}.parallel",), always=True)


def _engines(t: Translation) -> tuple[str, ...]:
    return ("actor", "critic") if t.get("algorithm.adv_estimator") == "gae" else ("actor",)


def offload(section: str, engine: str) -> Rule:
    """What verl offloads between the tasks of a section."""
    keys = {
        f"{section}.{part}.{name}": target
        for part in ("megatron", "fsdp_config", "fsdp", "model.fsdp_config")
        for name, target in OFFLOAD.items()
    } | {f"{section}.{name}": target for name, target in OFFLOAD.items()}

    def apply(t: Translation) -> None:
        for key in t.current:
            if not t.flag(key):
                t.imply("`sleep: auto` offloads only where engines do not fit together", key)
            elif has_own_rollout_nodes(t) and engine in _engines(t):
                t.write(f"engines.{engine}.offload.{keys[key]}", True, key)
            else:
                t.imply("`sleep: auto` offloads while another engine of the group works", key)

    return joint(apply, *keys, targets=(f"engines.{engine}.offload", f"engines.{engine}.sleep"))


def megatron_rest(section: str, engine: str) -> tuple[Rule, ...]:
    """Other keys of a section's ``megatron``."""
    prefix = f"{section}.megatron"

    def checkpoint(t: Translation) -> None:
        path = t.get(f"{prefix}.dist_checkpointing_path")
        if t.flag(f"{prefix}.use_dist_checkpointing") and is_known(path):
            t.write(f"engines.{engine}.dist_checkpointing_path", path)
        else:
            t.imply_all("weights come from the model's folder")

    return (
        joint(
            checkpoint,
            f"{prefix}.use_dist_checkpointing",
            f"{prefix}.dist_checkpointing_path",
            targets=(f"engines.{engine}.dist_checkpointing_path",),
        ),
        library_fields(f"{prefix}.override_transformer_config.*", engine, "transformer"),
        library_fields(f"{prefix}.override_ddp_config.*", engine, "ddp"),
        to(f"{prefix}.use_distributed_optimizer", f"engines.{engine}.optimizer.use_distributed_optimizer"),
        refused_unless(
            "disabled", "routes are recorded by `router_replay`, from the generator", f"{prefix}.router_replay.mode"
        ),
        refused_unless(False, "Megatron's FSDP is not built in", f"{prefix}.use_megatron_fsdp"),
        refused_unless(False, "sequences are split evenly", f"{prefix}.dynamic_context_parallel"),
        refused_unless((False, {}), "there is no training of quantized weights", f"{prefix}.qat.*"),
        implied(
            "follows from the model and the devices",
            f"{prefix}.override_ddp_config",
            f"{prefix}.override_transformer_config",
            f"{prefix}.use_mbridge",
            f"{prefix}.vanilla_mbridge",
            f"{prefix}.seed",
            f"{prefix}.dtype",
            f"{prefix}.param_dtype",
            f"{prefix}.pad_*",
            f"{prefix}.use_remove_padding",
            f"{prefix}.forward_only",
            f"{prefix}.load_weight",
            f"{prefix}.extra*",
            f"{prefix}.override_mcore_model_config*",
            f"{prefix}.entropy_*",
            f"{prefix}.dist_ckpt_*",
            f"{prefix}.distrib_*",
            f"{prefix}.dist_checkpointing_prefix",
            f"{prefix}.router_replay.*",
            f"{prefix}.max_seqlen_per_dp_cp_rank",
        ),
    )


def _recompute(t: Translation) -> None:
    key = f"{MODEL}.enable_gradient_checkpointing"
    if is_megatron(t):
        t.imply("with Megatron, `override_transformer_config` decides what is computed anew", key)
    elif t.flag(key):
        for name, value in _RECOMPUTE.items():
            t.write(f"engines.actor.transformer.{name}", value, key)
    else:
        t.imply("nothing is computed anew, as by default", key)


def _lora(t: Translation) -> None:
    nested = bool(t.number(f"{MODEL}.lora.rank", 0))
    rank = t.number(f"{MODEL}.lora.rank", 0) or t.number(f"{MODEL}.lora_rank", 0)
    if not rank:
        t.imply_all("there are no adapters")
        return
    prefix = f"{MODEL}.lora." if nested else f"{MODEL}.lora_"
    t.write("engines.actor.lora.rank", rank, f"{prefix}rank")
    t.write("engines.actor.lora.alpha", t.get(f"{prefix}alpha"), f"{prefix}alpha")
    if nested:
        for name in ("dropout", "merge"):
            if t.given(f"{prefix}{name}"):
                t.write(f"engines.actor.lora.{name}", t.get(f"{prefix}{name}"), f"{prefix}{name}")
    key = f"{MODEL}.lora.target_modules" if nested else f"{MODEL}.target_modules"
    _target_modules(t, key)
    given = [k for k in t.current if not t.is_recorded(k)]
    t.refuse("adapters start as `lora.init` says, on the layers of `lora.target_modules`", *given)


def _target_modules(t: Translation, key: str) -> None:
    modules = t.get(key)
    if not t.given(key) or modules == "all-linear":
        t.imply("all linear layers, as by default", key)
        return
    names = modules if isinstance(modules, list) else [modules]
    layers = [name if str(name).startswith("linear_") else _LAYERS.get(str(name)) for name in names]
    if None in layers:
        t.refuse("names layers that have no counterpart in Megatron", key)
    else:
        t.write("engines.actor.lora.target_modules", list(dict.fromkeys(layers)), key)


def _optimizer(section: str, engine: str) -> Rule:
    prefix = f"{section}.optim"
    clip = f"{section}.grad_clip"

    def apply(t: Translation) -> None:
        if engine not in _engines(t):
            t.imply_all("there is no critic with this estimator")
            return
        target = f"engines.{engine}.optimizer"
        t.write(f"{target}.lr", t.get(f"{prefix}.lr"), f"{prefix}.lr")
        t.write(f"{target}.weight_decay", t.get(f"{prefix}.weight_decay"), f"{prefix}.weight_decay")
        used, other = (f"{prefix}.clip_grad", clip) if is_megatron(t) else (clip, f"{prefix}.clip_grad")
        if t.given(used):
            t.write(f"{target}.clip_grad", t.get(used), used)
            t.imply("`grad_clip` bounds with FSDP, `optim.clip_grad` with Megatron", other)
        elif t.given(other):
            t.write(f"{target}.clip_grad", t.get(other), other)
        betas = t.get(f"{prefix}.betas")
        if isinstance(betas, list) and len(betas) == 2:
            for name, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
                t.write(f"{target}.{name}", beta, f"{prefix}.betas")
        if str(t.get(f"{prefix}.optimizer", "adam")).casefold() in ("adam", "adamw"):
            t.imply("Adam with decoupled weight decay, as by default", f"{prefix}.optimizer")
        else:
            t.refuse("optimizers are adam and sgd", f"{prefix}.optimizer")
        overrides = f"{prefix}.override_optimizer_config."
        for key in t.current:
            if key.startswith(overrides):
                library_field(t, key, engine, "optimizer", key.removeprefix(overrides))
        for name in ("use_precision_aware_optimizer", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if t.given(f"{prefix}.{name}"):
                t.write(f"{target}.{name}", t.get(f"{prefix}.{name}"), f"{prefix}.{name}")

    keys = [
        f"{prefix}.{name}"
        for name in (
            *("lr", "weight_decay", "clip_grad", "betas", "optimizer", "use_precision_aware_optimizer"),
            *("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
        )
    ]
    return joint(
        apply,
        *keys,
        clip,
        f"{prefix}.override_optimizer_config*",
        targets=(f"engines.{engine}.optimizer",),
        always=True,
    )


def _schedule(section: str, engine: str) -> Rule:
    """The learning rate's schedule, which verl too moves once for each training batch."""
    prefix = f"{section}.optim"
    styles = ("lr_decay_style", "lr_scheduler_type", "warmup_style")

    def apply(t: Translation) -> None:
        if engine not in _engines(t):
            t.imply_all("there is no critic with this estimator")
            return
        target = f"engines.{engine}.lr_schedule"
        warmup, ratio = t.number(f"{prefix}.lr_warmup_steps", -1), t.number(f"{prefix}.lr_warmup_steps_ratio", 0)
        steps = t.tree.get("run.steps")
        if warmup > 0:
            t.write(f"{target}.lr_warmup_steps", warmup, f"{prefix}.lr_warmup_steps")
        elif ratio and isinstance(steps, int):
            note = f"{ratio} of {steps} steps"
            t.write(f"{target}.lr_warmup_steps", int(ratio * steps), f"{prefix}.lr_warmup_steps_ratio", note=note)
        if warmup <= 0 and not ratio:
            names = (f"{prefix}.lr_warmup_steps", f"{prefix}.lr_warmup_steps_ratio")
            t.imply("there is no warm-up, as by default", *names)
        key = next((f"{prefix}.{style}" for style in styles if is_known(t.get(f"{prefix}.{style}"))), None)
        style = t.get(key) if key else "constant"
        if key and style in ("constant", "linear", "cosine", "inverse-square-root"):
            t.write(f"{target}.lr_decay_style", style, key)
        elif key:
            t.refuse("shapes are constant, linear, cosine and inverse-square-root", key)
        if style in ("linear", "cosine"):
            floor, part = t.number(f"{prefix}.min_lr"), t.number(f"{prefix}.min_lr_ratio", 0)
            lr = t.tree.get(f"engines.{engine}.optimizer.lr")
            if floor:
                t.write(f"{target}.min_lr", floor, f"{prefix}.min_lr")
            elif part and isinstance(lr, int | float):
                t.write(f"{target}.min_lr", part * lr, f"{prefix}.min_lr_ratio", note=f"{part} of {lr}")
        if is_known(t.get(f"{prefix}.lr_decay_steps")) and t.given(f"{prefix}.lr_decay_steps"):
            t.write(f"{target}.lr_decay_steps", t.get(f"{prefix}.lr_decay_steps"), f"{prefix}.lr_decay_steps")

    names = ("lr_warmup_steps", "lr_warmup_steps_ratio", *styles, "min_lr", "min_lr_ratio", "lr_decay_steps")
    return joint(apply, *(f"{prefix}.{name}" for name in names), targets=(f"engines.{engine}.lr_schedule",))


def optimizer_rest(section: str) -> Rule:
    """Keys of an optimizer that need no counterpart, or have none."""
    prefix = f"{section}.optim"
    return refused_unless(
        (-1, 0, 0.0, 0.5, "constant", "exponential", "torch.optim", False, True, "fp32"),
        "the learning rate has a warm-up and a shape; see `lr_schedule`",
        *(f"{prefix}.{name}" for name in ("total_training_steps", "num_cycles", "zero_indexed_step", "optimizer_impl")),
        *(f"{prefix}.{name}" for name in ("lr_warmup_init", "weight_decay_incr_style", "lr_wsd_*", "muon_*", "use_*")),
    )


def _clip(t: Translation) -> None:
    """Bounds of the ratio. ``clip_ratio_low`` and ``_high`` have defaults: ``clip_ratio`` alone has no effect."""
    low, high, plain = (f"{ACTOR}.{name}" for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio"))
    bounds = []
    for key in (low, high):
        value = t.get(key)
        bounds.append((t.get(plain, 0.2), plain) if value is None else (value, key))
    (low_value, low_key), (high_value, high_key) = bounds
    t.write("nodes.update.loss.clip_ratio", low_value, low_key)
    if high_value != low_value or t.given(high_key):
        t.write("nodes.update.loss.clip_ratio_high", high_value, high_key)
    if plain not in (low_key, high_key):
        reason = (
            f"has no effect in verl: `clip_ratio_low` {low_value} and `clip_ratio_high` {high_value} take its place"
        )
        t.imply(reason, plain)
    dual = f"{ACTOR}.clip_ratio_c"
    if t.tree.get("nodes.update.loss.policy", "ppo_clip") == "ppo_clip":
        t.write("nodes.update.loss.dual_clip", t.get(dual), dual)
    else:
        t.imply("has no effect on this loss", dual)


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
}


def _policy(t: Translation) -> None:
    key = f"{ACTOR}.policy_loss.loss_mode"
    mode = t.get(key)
    drift, own = f"{ACTOR}.policy_drift_coeff", f"{ACTOR}.use_cpgd_loss"
    if t.flag(own):
        mode, key = "cpgd", own
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
            if t.given(f"{ACTOR}.{name}"):
                t.write(f"nodes.update.loss.{name}", t.get(f"{ACTOR}.{name}"), f"{ACTOR}.{name}")


def _covariance(t: Translation, policy: str) -> None:
    prefix = f"{ACTOR}.policy_loss"
    t.put("nodes.held.op", "covariance")
    if t.get("algorithm.rollout_correction.bypass_mode") is True:
        t.put("nodes.held.read", {"old_logprob": "rollout_logprob"})
    t.write("nodes.held.share", t.get(f"{prefix}.{policy}_ratio"), f"{prefix}.{policy}_ratio")
    if policy == "clip_cov":
        bounds = [t.get(f"{prefix}.clip_cov_lb"), t.get(f"{prefix}.clip_cov_ub")]
        t.write("nodes.held.between", bounds, f"{prefix}.clip_cov_lb", f"{prefix}.clip_cov_ub")
    else:
        t.write("nodes.update.loss.kl_cov_coef", t.get(f"{prefix}.ppo_kl_coef"), f"{prefix}.ppo_kl_coef")


def _aggregation(t: Translation) -> None:
    key = f"{ACTOR}.loss_agg_mode"
    mode = t.get(key)
    if t.tree.get("nodes.update.loss.policy") in ("gspo", "gmpo"):
        t.imply("has no effect on this loss, a mean over responses", key)
    elif mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        t.write("nodes.update.loss.aggregation", mode, key)
    else:
        t.refuse("aggregations are token-mean and seq-mean-token-mean, -sum and -sum-norm", key)
    scale = f"{ACTOR}.loss_scale_factor"
    if t.get(scale) in (None, t.tree.get("nodes.rollout.sampling.max_new_tokens")):
        t.imply("the divisor is `max_new_tokens`", scale)
    else:
        t.refuse("the divisor of seq-mean-token-sum-norm is `max_new_tokens`", scale)


KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def kl_estimator(name: Any) -> str | None:
    """Dagrl's name of an estimator of the divergence; ``low_var_kl`` is ``k3`` with the same bound."""
    text = str(name)
    base = KL_ESTIMATORS.get(text.removesuffix("+"))
    return None if base is None else base + ("+" if text.endswith("+") and base != "k2" else "")


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


def _ref_tokens(t: Translation) -> None:
    if t.tree.get("nodes.ref.op") is None:
        t.imply_all("nothing reads log-probs of the reference")
    else:
        packed_tokens(t, "nodes.ref.tokens_per_micro_batch", REF, "log_prob_", context_parallel(t, ACTOR))


def _ref_layout(t: Translation) -> None:
    for key in t.current:
        same = key.replace(f"{REF}.", f"{ACTOR}.", 1)
        if t.get(key) == t.get(same) or t.get(key) in (None, False, True) or not is_megatron(t):
            t.imply("the reference is a frozen copy of the actor, in its layout", key)
        else:
            t.refuse("the reference is a frozen copy of the actor, in its layout", key)


def _tis(t: Translation) -> None:
    key = f"{ACTOR}.tis_imp_ratio_cap"
    if t.number(key, -1) > 0:
        t.write("nodes.update.rollout_correction.rollout_is", "token", key)
        t.write("nodes.update.rollout_correction.rollout_is_threshold", t.get(key), key)
    else:
        t.imply("there is no correction, as by default", key)


ENGINE = (
    joint(
        _strategy,
        "model_engine",
        f"{ACTOR}.strategy",
        "--config-name",
        targets=("engines.actor.backend",),
        always=True,
    ),
    to(f"{MODEL}.path", "model.path", write_default=True),
    to(f"{MODEL}.tokenizer_path", "model.tokenizer"),
    layout(ACTOR, "actor"),
    offload(ACTOR, "actor"),
    *megatron_rest(ACTOR, "actor"),
    joint(
        _recompute,
        f"{MODEL}.enable_gradient_checkpointing",
        targets=("engines.actor.transformer",),
        always=True,
    ),
    to(f"{MODEL}.use_fused_kernels", "engines.actor.fused_linear_cross_entropy"),
    joint(
        _lora,
        f"{MODEL}.lora_rank",
        f"{MODEL}.lora_alpha",
        f"{MODEL}.target_modules",
        f"{MODEL}.exclude_modules",
        f"{MODEL}.lora_adapter_path",
        f"{MODEL}.lora.*",
        targets=("engines.actor.lora",),
    ),
    refused_unless(False, "draft models are not trained or served", f"{MODEL}.mtp.*", f"{MODEL}.mtp"),
    refused_unless((None, {}), "the model's config.json holds", f"{MODEL}.override_config*", f"{MODEL}.hf_config_path"),
    refused_unless(None, "the chat template is the tokenizer's", f"{MODEL}.custom_chat_template"),
    implied(
        MEMORY,
        f"{MODEL}.use_remove_padding",
        f"{MODEL}.use_liger",
        f"{MODEL}.enable_activation_offload",
        f"{MODEL}.fused_kernel_options.*",
        f"{MODEL}.tiled_mlp.*",
        f"{MODEL}.gradient_checkpointing_kwargs*",
    ),
    implied(
        "follows from the model's folder",
        f"{MODEL}.trust_remote_code",
        f"{MODEL}.use_shm",
        f"{MODEL}.external_lib",
        f"{MODEL}.model_type",
    ),
    _optimizer(ACTOR, "actor"),
)

UPDATE = (
    to(f"{ACTOR}.ppo_mini_batch_size", "nodes.update.mini_batch", write_default=True, note="prompts in both"),
    to(f"{ACTOR}.ppo_epochs", "nodes.update.epochs"),
    joint(
        _policy,
        f"{ACTOR}.policy_loss.*",
        f"{ACTOR}.tau_pos",
        f"{ACTOR}.tau_neg",
        f"{ACTOR}.use_cpgd_loss",
        f"{ACTOR}.policy_drift_coeff",
        f"{ACTOR}.policy_loss.loss_mode",
        targets=("nodes.update.loss.policy", "nodes.held"),
        always=True,
    ),
    joint(
        _clip,
        f"{ACTOR}.clip_ratio",
        f"{ACTOR}.clip_ratio_low",
        f"{ACTOR}.clip_ratio_high",
        f"{ACTOR}.clip_ratio_c",
        targets=("nodes.update.loss.clip_ratio", "nodes.update.loss.clip_ratio_high", "nodes.update.loss.dual_clip"),
        always=True,
    ),
    joint(
        _aggregation,
        f"{ACTOR}.loss_agg_mode",
        f"{ACTOR}.loss_scale_factor",
        targets=("nodes.update.loss.aggregation",),
        always=True,
    ),
    to(f"{ACTOR}.entropy_coeff", "nodes.update.loss.entropy_coef", write_default=True),
    joint(
        _kl,
        f"{ACTOR}.use_kl_loss",
        f"{ACTOR}.kl_loss_coef",
        f"{ACTOR}.kl_loss_type",
        targets=("nodes.update.loss.kl_coef", "nodes.update.loss.kl_estimator"),
    ),
    joint(put_reference, always=True),
    joint(
        _update_tokens,
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        f"{ACTOR}.ppo_micro_batch_size",
        f"{ACTOR}.use_dynamic_bsz",
        targets=("nodes.update.tokens_per_micro_batch",),
    ),
    joint(
        _ref_tokens,
        f"{REF}.log_prob_max_token_len_per_gpu",
        f"{REF}.log_prob_micro_batch_size_per_gpu",
        f"{REF}.log_prob_micro_batch_size",
        f"{REF}.log_prob_use_dynamic_bsz",
        targets=("nodes.ref.tokens_per_micro_batch",),
    ),
    joint(
        _ref_layout,
        f"{REF}.megatron.*",
        f"{REF}.fsdp_config.*",
        f"{REF}.ulysses_sequence_parallel_size",
        f"{REF}.strategy",
    ),
    joint(_tis, f"{ACTOR}.tis_imp_ratio_cap", targets=("nodes.update.rollout_correction",)),
    to(f"{ACTOR}.checkpoint.async_save", "run.async_save"),
    to(
        f"{ACTOR}.freeze_vision_tower",
        "engines.actor.freeze",
        convert=lambda frozen: ["vision"] if frozen else [],
    ),
    refused(FSDP, f"{ACTOR}.fsdp_config.*"),
    refused_unless(False, "mini-batches follow the order of the samples", f"{ACTOR}.shuffle"),
    refused_unless(True, "old log-probs are computed where an update reads them", f"{ACTOR}.recompute_old_log_prob"),
    refused_unless((False, {}), "there is no training of quantized weights", f"{ACTOR}.qat.*", f"{ACTOR}.qat"),
    implied(
        MEMORY,
        f"{ACTOR}.use_torch_compile",
        f"{ACTOR}.entropy_*",
        f"{ACTOR}.use_remove_padding",
        f"{ACTOR}.use_fused_kernels",
        f"{ACTOR}.pad_to_length*",
        f"{ACTOR}.use_prefix_grouper",
        f"{REF}.entropy_*",
        f"{REF}.use_torch_compile",
        f"{REF}.pad_to_length*",
        f"{REF}.*",
    ),
    implied(
        "is measured or saved by itself",
        f"{ACTOR}.calculate_*",
        f"{ACTOR}.checkpoint.*",
        f"{ACTOR}.data_loader_seed",
        f"{ACTOR}.load_weight",
        f"{ACTOR}.rollout_n",
        f"{ACTOR}._target_",
    ),
    refused("is `profile` of the pipeline (docs/profiling.md)", f"{ACTOR}.profile*"),
    optimizer_rest(ACTOR),
)

SCHEDULE = (_schedule(ACTOR, "actor"), _schedule("critic", "critic"))
CRITIC_OPTIMIZER = _optimizer("critic", "critic")
