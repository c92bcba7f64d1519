"""verl's engines: groups of GPUs, models, layouts, optimizers and micro-batches."""

from __future__ import annotations

from dagrl.importing.engines import (
    NO_CRITIC,
    PARALLEL,
    RECOMPUTE,
    critic_model,
    library_field,
    library_fields,
    put_critic,
    write_betas,
    write_shape,
    write_warmup_ratio,
)
from dagrl.importing.parts import is_known, put_critic_nodes, put_reference
from dagrl.importing.table import Rule, Translation, implied, joint, refused_unless, to, under
from dagrl.importing.verl.common import (
    ACTOR,
    MEMORY,
    MODEL,
    REF,
    context_parallel,
    is_megatron,
    packed_tokens,
    trained_engines,
    uses_critic,
)

_LAYERS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "linear_qkv"),
    "o_proj": "linear_proj",
    **dict.fromkeys(("gate_proj", "up_proj"), "linear_fc1"),
    "down_proj": "linear_fc2",
}


_ADAPTER_FOLDERS = (f"{MODEL}.lora.adapter_path", f"{MODEL}.lora_adapter_path")


def _recompute(t: Translation) -> None:
    key = f"{MODEL}.enable_gradient_checkpointing"
    if is_megatron(t):
        t.imply("with Megatron, `override_transformer_config` decides what is computed anew", key)
    elif t.flag(key):
        for name, value in RECOMPUTE.items():
            t.write(f"engines.actor.transformer.{name}", value, key)
    else:
        t.imply("nothing is computed anew, as by default", key)


def _lora(t: Translation) -> None:
    nested = bool(t.number(f"{MODEL}.lora.rank", 0))
    rank = t.number(f"{MODEL}.lora.rank", 0) or t.number(f"{MODEL}.lora_rank", 0)
    folder = next((key for key in _ADAPTER_FOLDERS if t.get(key)), None)
    if not rank and folder is None:
        t.imply_all("there are no adapters")
        return
    if folder is not None:
        t.write("engines.actor.lora.path", t.get(folder), folder)
    if not rank:
        reason = "rank, alpha and layers are those of the folder's adapter_config.json; write them"
        t.note(f"{MODEL}.lora_rank", "engines.actor.lora.rank", reason)
        t.imply_all("those of the folder count")
        return
    prefix = f"{MODEL}.lora." if nested else f"{MODEL}.lora_"
    t.write("engines.actor.lora.rank", rank, f"{prefix}rank")
    t.write("engines.actor.lora.alpha", t.get(f"{prefix}alpha"), f"{prefix}alpha")
    if nested:
        for name in ("dropout", "merge"):
            t.copy(f"{prefix}{name}", f"engines.actor.lora.{name}")
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


MODEL_RULES = (
    to(f"{MODEL}.path", "model.path", write_default=True),
    to(f"{MODEL}.tokenizer_path", "model.tokenizer"),
    joint(_recompute, under(MODEL, "enable_gradient_checkpointing"), always=True),
    to(f"{MODEL}.use_fused_kernels", "engines.actor.fused_linear_cross_entropy"),
    joint(_lora, under(MODEL, "lora_rank lora_alpha target_modules exclude_modules lora_adapter_path lora.*")),
    refused_unless(False, "draft models are not trained or served", under(MODEL, "mtp.*")),
    refused_unless((None, {}), "the model's config.json holds", under(MODEL, "override_config* hf_config_path")),
    refused_unless(None, "the chat template is the tokenizer's", under(MODEL, "custom_chat_template")),
    implied(
        MEMORY,
        under(
            MODEL,
            "use_remove_padding use_liger enable_activation_offload fused_kernel_options.* "
            "tiled_mlp.* gradient_checkpointing_kwargs*",
        ),
    ),
    implied("follows from the model's folder", under(MODEL, "trust_remote_code use_shm external_lib")),
)


def layout(section: str, engine: str) -> Rule:
    """Translate Megatron's sizes of a section, and Ulysses' sequence parallelism with FSDP."""
    keys = [f"{section}.megatron.{size}" for size in PARALLEL]
    ulysses = (f"{section}.ulysses_sequence_parallel_size", f"{section}.fsdp_config.ulysses_sequence_parallel_size")
    sequence = f"{section}.megatron.sequence_parallel"

    def apply(t: Translation) -> None:
        if engine not in trained_engines(t):
            t.imply_all(NO_CRITIC)
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

    return joint(apply, *keys, sequence, *ulysses, always=True)


def megatron_rest(section: str, engine: str) -> tuple[Rule, ...]:
    """Translate the other keys of a section's ``megatron``."""
    prefix = f"{section}.megatron"

    def checkpoint(t: Translation) -> None:
        path = t.get(f"{prefix}.dist_checkpointing_path")
        if t.flag(f"{prefix}.use_dist_checkpointing") and is_known(path):
            t.write(f"engines.{engine}.dist_checkpointing_path", path)
        else:
            t.imply_all("weights come from the model's folder")

    return (
        joint(checkpoint, under(prefix, "use_dist_checkpointing dist_checkpointing_path")),
        library_fields(f"{prefix}.override_transformer_config.*", engine, "transformer"),
        library_fields(f"{prefix}.override_ddp_config.*", engine, "ddp"),
        to(f"{prefix}.use_distributed_optimizer", f"engines.{engine}.optimizer.use_distributed_optimizer"),
        refused_unless(
            "disabled",
            "routes are recorded by `router_replay`, from the generator",
            under(prefix, "router_replay.mode"),
        ),
        refused_unless(False, "Megatron's FSDP is not built in", under(prefix, "use_megatron_fsdp")),
        refused_unless(False, "sequences are split evenly", under(prefix, "dynamic_context_parallel")),
        refused_unless((False, {}), "there is no training of quantized weights", under(prefix, "qat.*")),
        implied(
            "follows from the model and the devices",
            under(
                prefix,
                "override_ddp_config override_transformer_config use_mbridge vanilla_mbridge seed dtype "
                "param_dtype pad_* use_remove_padding forward_only load_weight extra* "
                "override_mcore_model_config* entropy_* dist_ckpt_* distrib_* dist_checkpointing_prefix "
                "router_replay.* max_seqlen_per_dp_cp_rank",
            ),
        ),
    )


def optimizer(section: str, engine: str) -> Rule:
    """Translate the optimizer of a section."""
    prefix = f"{section}.optim"
    clip = f"{section}.grad_clip"

    def apply(t: Translation) -> None:
        if engine not in trained_engines(t):
            t.imply_all(NO_CRITIC)
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
        write_betas(t, engine, f"{prefix}.betas")
        if str(t.get(f"{prefix}.optimizer", "adam")).casefold() in ("adam", "adamw"):
            t.imply("Adam with decoupled weight decay, as by default", f"{prefix}.optimizer")
        else:
            t.refuse("optimizers are adam and sgd", f"{prefix}.optimizer")
        overrides = f"{prefix}.override_optimizer_config."
        for key in t.current:
            if key.startswith(overrides):
                library_field(t, key, engine, "optimizer", key.removeprefix(overrides))
        for name in ("use_precision_aware_optimizer", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            t.copy(f"{prefix}.{name}", f"{target}.{name}")

    keys = [
        f"{prefix}.{name}"
        for name in (
            *("lr", "weight_decay", "clip_grad", "betas", "optimizer", "use_precision_aware_optimizer"),
            *("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
        )
    ]
    return joint(apply, under(prefix, "override_optimizer_config*"), *keys, clip, always=True)


def schedule(section: str, engine: str) -> Rule:
    """Translate the learning rate's schedule, which verl too moves once for each training batch."""
    prefix = f"{section}.optim"
    styles = ("lr_decay_style", "lr_scheduler_type", "warmup_style")

    def apply(t: Translation) -> None:
        if engine not in trained_engines(t):
            t.imply_all(NO_CRITIC)
            return
        target = f"engines.{engine}.lr_schedule"
        if is_known(t.get(f"{prefix}.lr_decay_steps")) and t.given(f"{prefix}.lr_decay_steps"):
            t.write(f"{target}.lr_decay_steps", t.get(f"{prefix}.lr_decay_steps"), f"{prefix}.lr_decay_steps")
        warmup, ratio = t.number(f"{prefix}.lr_warmup_steps", -1), t.number(f"{prefix}.lr_warmup_steps_ratio", 0)
        if warmup > 0:
            t.write(f"{target}.lr_warmup_steps", warmup, f"{prefix}.lr_warmup_steps")
        else:
            write_warmup_ratio(t, engine, f"{prefix}.lr_warmup_steps_ratio")
        if warmup <= 0 and not ratio:
            names = (f"{prefix}.lr_warmup_steps", f"{prefix}.lr_warmup_steps_ratio")
            t.imply("there is no warm-up, as by default", *names)
        key = next((f"{prefix}.{style}" for style in styles if is_known(t.get(f"{prefix}.{style}"))), None)
        style = t.get(key) if key else "constant"
        if key:
            write_shape(t, engine, key)
        if style in ("linear", "cosine"):
            floor, part = t.number(f"{prefix}.min_lr"), t.number(f"{prefix}.min_lr_ratio", 0)
            lr = t.tree.get(f"engines.{engine}.optimizer.lr")
            if floor:
                t.write(f"{target}.min_lr", floor, f"{prefix}.min_lr")
            elif part and isinstance(lr, int | float):
                t.write(f"{target}.min_lr", part * lr, f"{prefix}.min_lr_ratio", note=f"{part} of {lr}")

    names = ("lr_warmup_steps", "lr_warmup_steps_ratio", *styles, "min_lr", "min_lr_ratio", "lr_decay_steps")
    return joint(apply, *(f"{prefix}.{name}" for name in names))


def optimizer_rest(section: str) -> Rule:
    """Keys of an optimizer that need no counterpart, or have none."""
    prefix = f"{section}.optim"
    return refused_unless(
        (-1, 0, 0.0, 0.5, "constant", "exponential", "torch.optim", False, True, "fp32"),
        "the learning rate has a warm-up and a shape; see `lr_schedule`",
        under(
            prefix,
            "total_training_steps num_cycles zero_indexed_step optimizer_impl lr_warmup_init "
            "weight_decay_incr_style lr_wsd_* muon_* use_*",
        ),
    )


def _engine(t: Translation) -> None:
    if not uses_critic(t):
        t.imply_all(NO_CRITIC)
        return
    put_critic(t)
    critic_model(t, "critic.model.path", f"{MODEL}.path")
    key = "critic.model.enable_gradient_checkpointing"
    if t.get(key) is not False and not is_megatron(t):
        for name, value in RECOMPUTE.items():
            t.write(f"engines.critic.transformer.{name}", value, key)
    else:
        t.imply("with Megatron, `override_transformer_config` decides what is computed anew", key)


def _nodes(t: Translation) -> None:
    if not uses_critic(t):
        t.imply_all(NO_CRITIC)
        return
    put_critic_nodes(t)
    for name, target in (
        ("ppo_mini_batch_size", "mini_batch"),
        ("ppo_epochs", "epochs"),
        ("loss_agg_mode", "aggregation"),
    ):
        actor = f"{ACTOR}.{name}"
        if t.given(f"critic.{name}"):
            t.write(f"nodes.critic.{target}", t.get(f"critic.{name}"), f"critic.{name}")
        elif target == "mini_batch" or t.given(actor):
            t.write(f"nodes.critic.{target}", t.get(actor), actor)
    t.copy("critic.cliprange_value", "nodes.critic.cliprange_value")
    parallel = context_parallel(t, "critic")
    packed_tokens(
        t, "nodes.critic.tokens_per_micro_batch", "critic", "ppo_", parallel, dynamic_key="critic.use_dynamic_bsz"
    )
    if any(t.given(f"critic.forward_{name}_per_gpu") for name in ("max_token_len", "micro_batch_size")):
        dynamic = "critic.use_dynamic_bsz"
        packed_tokens(t, "nodes.values.tokens_per_micro_batch", "critic", "forward_", parallel, dynamic_key=dynamic)


CRITIC = (
    joint(_engine, "critic.model.path critic.model.enable_gradient_checkpointing", always=True),
    layout("critic", "critic"),
    optimizer("critic", "critic"),
    joint(
        _nodes,
        "critic.ppo_mini_batch_size critic.ppo_epochs critic.loss_agg_mode critic.cliprange_value "
        "critic.use_dynamic_bsz critic.ppo_max_token_len_per_gpu critic.ppo_micro_batch_size_per_gpu "
        "critic.forward_max_token_len_per_gpu critic.forward_micro_batch_size_per_gpu "
        "critic.forward_micro_batch_size critic.ppo_micro_batch_size",
        always=True,
    ),
    *megatron_rest("critic", "critic"),
    implied(
        MEMORY,
        "critic.model.* critic.fsdp* critic.strategy critic.enable critic.shuffle critic.checkpoint.* "
        "critic.rollout_n critic.data_loader_seed critic.load_weight critic.nccl_timeout critic._target_",
    ),
    refused_unless(None, "is `profile` of the pipeline (docs/profiling.md)", "critic.profile*"),
    optimizer_rest("critic"),
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


REFERENCE = (
    joint(put_reference, always=True),
    joint(
        _ref_tokens,
        under(
            REF,
            "log_prob_max_token_len_per_gpu log_prob_micro_batch_size_per_gpu "
            "log_prob_micro_batch_size log_prob_use_dynamic_bsz",
        ),
    ),
    joint(_ref_layout, under(REF, "megatron.* fsdp_config.* ulysses_sequence_parallel_size strategy")),
    implied(MEMORY, under(REF, "entropy_* use_torch_compile *")),
)
