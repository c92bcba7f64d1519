"""verl's engines: groups of GPUs, models, layouts, optimizers and micro-batches."""

from __future__ import annotations

from dagrl.importing import engines, parts
from dagrl.importing.table import Rule, Translation, implied, is_known, joint, refused, refused_unless, to, under
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
_RECOMPUTES = "with Megatron, `override_transformer_config` selects recomputation"


@joint(under(MODEL, "enable_gradient_checkpointing"), always=True)
def _recompute(t: Translation) -> None:
    key = f"{MODEL}.enable_gradient_checkpointing"
    if is_megatron(t):
        t.imply(_RECOMPUTES, key)
    elif t.flag(key):
        for name, value in engines.RECOMPUTE.items():
            t.write(f"engines.actor.transformer.{name}", value, key)


@joint(under(MODEL, "lora_rank lora_alpha target_modules exclude_modules lora_adapter_path lora.*"))
def _lora(t: Translation) -> None:
    nested, target = bool(t.number(f"{MODEL}.lora.rank", 0)), "engines.actor.lora"
    prefix = f"{MODEL}.lora." if nested else f"{MODEL}.lora_"
    rank = t.number(f"{prefix}rank", 0)
    folder = next((key for key in (f"{MODEL}.lora.adapter_path", f"{MODEL}.lora_adapter_path") if t.get(key)), None)
    if folder:
        t.copy(folder, f"{target}.path")
    if folder and not rank:
        reason = "rank, alpha and layers are in the folder's adapter_config.json; write them"
        t.note(f"{MODEL}.lora_rank", f"{target}.rank", reason)
    if not rank:
        return
    t.copy(f"{prefix}rank", f"{target}.rank")
    t.copy(f"{prefix}alpha", f"{target}.alpha")
    if nested:
        t.copy(f"{prefix}dropout", f"{target}.dropout")
        t.copy(f"{prefix}merge", f"{target}.merge")
    _target_modules(t, f"{MODEL}.lora.target_modules" if nested else f"{MODEL}.target_modules")
    t.refuse("adapters start as `lora.init` says, on the layers of `lora.target_modules`", *t.rest())


def _target_modules(t: Translation, key: str) -> None:
    modules = t.get(key, "all-linear")
    if modules == "all-linear":
        t.imply("all linear layers, as by default", key)
        return
    names = [str(name) for name in parts.as_list(modules)]
    layers = [name if name.startswith("linear_") else _LAYERS.get(name) for name in names]
    if None in layers:
        t.refuse("names layers that have no counterpart in Megatron", key)
    else:
        t.write("engines.actor.lora.target_modules", list(dict.fromkeys(layers)), key)


MODEL_RULES = (
    to(f"{MODEL}.path", "model.path", write_default=True),
    to(f"{MODEL}.tokenizer_path", "model.tokenizer"),
    _recompute,
    to(f"{MODEL}.use_fused_kernels", "engines.actor.fused_linear_cross_entropy"),
    _lora,
    refused("draft models are not trained or served", under(MODEL, "mtp.*")),
    refused("the model's config.json holds", under(MODEL, "override_config* hf_config_path")),
    refused("the chat template is the tokenizer's", under(MODEL, "custom_chat_template")),
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
    megatron = f"{section}.megatron"
    sizes = under(megatron, " ".join(engines.PARALLEL)).split()
    ulysses = (f"{section}.ulysses_sequence_parallel_size", f"{section}.fsdp_config.ulysses_sequence_parallel_size")

    @joint(*sizes, f"{megatron}.sequence_parallel", *ulysses, always=True)
    def rule(t: Translation) -> None:
        target, ranks, tensor = f"engines.{engine}.parallel", context_parallel(t, section), t.number(sizes[0], 1)
        if engine not in trained_engines(t):
            return
        if not is_megatron(t):
            note = "Ulysses' sequence parallelism is Megatron's context parallelism"
            if ranks > 1:
                t.write(f"{target}.context_parallel_size", ranks, *ulysses, note=note)
            return
        engines.write_layout(t, engine, megatron)
        if tensor > 1 and t.number(sizes[4], 1) > 1 and not is_known(t.get(sizes[5])):
            # In Megatron, and so in verl, experts are split like the other matrices unless this is set.
            t.write(f"{target}.expert_tensor_parallel_size", tensor, sizes[5])
        t.refuse("has no effect with Megatron: `megatron.context_parallel_size` has", *ulysses)

    return rule


def megatron_rest(section: str, engine: str) -> tuple[Rule, ...]:
    """Translate the other keys of a section's ``megatron``."""
    prefix = f"{section}.megatron"

    @joint(under(prefix, "use_dist_checkpointing dist_checkpointing_path"))
    def checkpoint(t: Translation) -> None:
        if t.flag(f"{prefix}.use_dist_checkpointing") and is_known(t.get(f"{prefix}.dist_checkpointing_path")):
            t.write(f"engines.{engine}.dist_checkpointing_path", t.get(f"{prefix}.dist_checkpointing_path"))
        else:
            t.imply("weights come from the model's folder", *t.current)

    return (
        checkpoint,
        engines.library_fields(f"{prefix}.override_transformer_config.*", engine, "transformer"),
        engines.library_fields(f"{prefix}.override_ddp_config.*", engine, "ddp"),
        to(f"{prefix}.use_distributed_optimizer", f"engines.{engine}.optimizer.use_distributed_optimizer"),
        refused_unless(
            "disabled",
            "routes are recorded by `router_replay`, from the generator",
            under(prefix, "router_replay.mode"),
        ),
        refused("Megatron's FSDP is not built in", under(prefix, "use_megatron_fsdp")),
        refused("sequences are split evenly", under(prefix, "dynamic_context_parallel")),
        refused("there is no training of quantized weights", under(prefix, "qat.*")),
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


_PRECISIONS = ("use_precision_aware_optimizer", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def optimizer(section: str, engine: str) -> Rule:
    optim = f"{section}.optim"

    @joint(
        under(optim, "override_optimizer_config* lr weight_decay clip_grad betas optimizer"),
        under(optim, " ".join(_PRECISIONS)),
        f"{section}.grad_clip",
        always=True,
    )
    def rule(t: Translation) -> None:
        if engine not in trained_engines(t):
            return
        target, clips = f"engines.{engine}.optimizer", [f"{optim}.clip_grad", f"{section}.grad_clip"]
        t.copy(f"{optim}.lr", f"{target}.lr")
        t.copy(f"{optim}.weight_decay", f"{target}.weight_decay")
        # `grad_clip` bounds with FSDP, `optim.clip_grad` with Megatron.
        if clip := next((key for key in (clips if is_megatron(t) else clips[::-1]) if t.given(key)), None):
            t.copy(clip, f"{target}.clip_grad")
        engines.write_betas(t, engine, f"{optim}.betas")
        if str(t.get(f"{optim}.optimizer", "adam")).casefold() not in ("adam", "adamw"):
            t.refuse("optimizers are adam and sgd", f"{optim}.optimizer")
        overrides = f"{optim}.override_optimizer_config"
        for key in t.below(overrides):
            engines.library_field(t, key, engine, "optimizer", key.removeprefix(f"{overrides}."))
        for name in _PRECISIONS:
            t.copy(f"{optim}.{name}", f"{target}.{name}")

    return rule


_STYLES = "lr_decay_style lr_scheduler_type warmup_style"


def schedule(section: str, engine: str) -> Rule:
    """Translate the learning rate's schedule, which verl also advances once for each training batch."""
    optim = f"{section}.optim"

    @joint(under(optim, f"lr_warmup_steps lr_warmup_steps_ratio {_STYLES} min_lr min_lr_ratio lr_decay_steps"))
    def rule(t: Translation) -> None:
        if engine not in trained_engines(t):
            return
        target, rate = f"engines.{engine}.lr_schedule", t.tree.get(f"engines.{engine}.optimizer.lr")
        t.copy(f"{optim}.lr_decay_steps", f"{target}.lr_decay_steps")
        t.copy(f"{optim}.lr_warmup_steps", f"{target}.lr_warmup_steps", above=0)
        if f"{target}.lr_warmup_steps" not in t.tree:
            engines.write_warmup_ratio(t, engine, f"{optim}.lr_warmup_steps_ratio")
        style = t.first(*under(optim, _STYLES).split())
        if style:
            engines.write_shape(t, engine, style)
        if style and t.get(style) in ("linear", "cosine"):
            part = t.number(f"{optim}.min_lr_ratio", 0)
            t.copy(f"{optim}.min_lr", f"{target}.min_lr", above=0)
            if f"{target}.min_lr" not in t.tree and part and isinstance(rate, int | float):
                t.write(f"{target}.min_lr", part * rate, f"{optim}.min_lr_ratio", note=f"{part} of {rate}")

    return rule


def optimizer_rest(section: str) -> Rule:
    """Keys of an optimizer without a counterpart."""
    return refused_unless(
        (-1, 0, 0.5, "constant", "exponential", "torch.optim", True, "fp32"),
        "the learning rate has a warm-up and a shape; see `lr_schedule`",
        under(
            f"{section}.optim",
            "total_training_steps num_cycles zero_indexed_step optimizer_impl lr_warmup_init "
            "weight_decay_incr_style lr_wsd_* muon_* use_*",
        ),
    )


@joint("critic.model.path critic.model.enable_gradient_checkpointing", always=True)
def _engine(t: Translation) -> None:
    if not uses_critic(t):
        return
    engines.put_critic(t)
    engines.critic_model(t, "critic.model.path", f"{MODEL}.path")
    key = "critic.model.enable_gradient_checkpointing"
    if t.get(key) is not False and not is_megatron(t):
        for name, value in engines.RECOMPUTE.items():
            t.write(f"engines.critic.transformer.{name}", value, key)
    else:
        t.imply(_RECOMPUTES, key)


@joint(
    under(
        "critic",
        "ppo_mini_batch_size ppo_epochs loss_agg_mode cliprange_value use_dynamic_bsz ppo_max_token_len_per_gpu "
        "ppo_micro_batch_size_per_gpu forward_max_token_len_per_gpu forward_micro_batch_size_per_gpu "
        "forward_micro_batch_size ppo_micro_batch_size",
    ),
    always=True,
)
def _nodes(t: Translation) -> None:
    if not uses_critic(t):
        return
    dynamic = "critic.use_dynamic_bsz"
    for name, target in (("mini_batch_size", "mini_batch"), ("epochs", "epochs"), ("agg_mode", "aggregation")):
        prefix = "loss" if target == "aggregation" else "ppo"
        own, actor = f"critic.{prefix}_{name}", f"{ACTOR}.{prefix}_{name}"
        if t.given(own) or t.given(actor) or target == "mini_batch":
            t.copy(own if t.given(own) else actor, f"nodes.critic.{target}")
    t.copy("critic.cliprange_value", "nodes.critic.cliprange_value")
    for node, prefix in (("critic", "ppo_"), ("values", "forward_")):
        keys = under("critic", f"{prefix}max_token_len_per_gpu {prefix}micro_batch_size_per_gpu").split()
        if node == "critic" or any(t.given(key) for key in keys):
            target, parallel = f"nodes.{node}.tokens_per_micro_batch", context_parallel(t, "critic")
            packed_tokens(t, target, "critic", prefix, parallel, dynamic_key=dynamic)


CRITIC = (
    _engine,
    layout("critic", "critic"),
    optimizer("critic", "critic"),
    _nodes,
    *megatron_rest("critic", "critic"),
    implied(
        MEMORY,
        under(
            "critic",
            "model.* fsdp* strategy enable shuffle checkpoint.* rollout_n data_loader_seed load_weight nccl_timeout "
            "_target_",
        ),
    ),
    refused("is `profile` of the pipeline (docs/profiling.md)", "critic.profile*"),
    optimizer_rest("critic"),
)


@joint(
    under(
        REF,
        "log_prob_max_token_len_per_gpu log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size "
        "log_prob_use_dynamic_bsz",
    )
)
def _ref_tokens(t: Translation) -> None:
    if "nodes.ref.op" in t.tree:
        packed_tokens(t, "nodes.ref.tokens_per_micro_batch", REF, "log_prob_", context_parallel(t, ACTOR))


@joint(under(REF, "megatron.* fsdp_config.* ulysses_sequence_parallel_size strategy"))
def _ref_layout(t: Translation) -> None:
    for key in t.current:
        actors = t.get(key.replace(f"{REF}.", f"{ACTOR}.", 1))
        if is_megatron(t) and t.get(key) not in (None, False, True, actors):
            t.refuse("the reference is a frozen copy of the actor, in its layout", key)
        else:
            t.imply("the reference is a frozen copy of the actor, in its layout", key)


REFERENCE = (
    joint(always=True)(parts.put_reference),
    _ref_tokens,
    _ref_layout,
    implied(MEMORY, under(REF, "entropy_* use_torch_compile *")),
)
