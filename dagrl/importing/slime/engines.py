"""slime's engines: groups of GPUs, models, layouts, optimizers and micro-batches."""

from __future__ import annotations

from dagrl.importing import engines, parts
from dagrl.importing.table import Translation, implied, joint, refused, to


def uses_critic(t: Translation) -> bool:
    return t.get("--advantage-estimator") == "ppo"


@joint(
    "--actor-num-nodes --actor-num-gpus-per-node --rollout-num-gpus --num-gpus-per-node --colocate",
    always=True,
)
def _groups(t: Translation) -> None:
    home = "gpus" if t.flag("--colocate") else "train"
    parts.first_group(t, home, "--actor-num-nodes", "--actor-num-gpus-per-node")
    if t.flag("--colocate"):
        t.imply("one group for both engines", "--colocate")
        t.put("engines.generator.group", home)
    else:
        t.put("engines.generator.group", "rollout")
        size, machine = t.number("--rollout-num-gpus", 8), t.number("--num-gpus-per-node", 8)
        if size > machine:
            t.put("groups.rollout.nodes", -(-size // machine))
        t.write("groups.rollout.gpus_per_node", min(size, machine), "--rollout-num-gpus")
    if uses_critic(t):
        t.put("engines.critic.group", home)


CLUSTER = (
    _groups,
    refused(
        "the critic shares the actor's group; `engines.critic.group` names another",
        "--critic-num-nodes --critic-num-gpus-per-node",
    ),
)


_VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
_LAYOUT = {f"--{name.replace('_', '-')}": name for name in engines.PARALLEL if not name.startswith("virtual")}
_TRANSFORMER = """
    recompute_granularity recompute_method recompute_num_layers recompute_modules attention_backend moe_grouped_gemm
    moe_permute_fusion moe_token_dispatcher_type moe_router_dtype moe_aux_loss_coeff moe_z_loss_coeff
    moe_router_bias_update_rate moe_layer_recompute moe_enable_deepep moe_flex_dispatcher_backend
    cross_entropy_loss_fusion account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    pipeline_model_parallel_layout microbatch_group_size_per_virtual_pipeline_stage
""".split()  # noqa: SIM905 (a list would take a line for each)
_OPTIMIZER = """
    adam_beta1 adam_beta2 adam_eps clip_grad optimizer_cpu_offload optimizer_offload_fraction
    use_precision_aware_optimizer overlap_cpu_optimizer_d2h_h2d main_grads_dtype main_params_dtype exp_avg_dtype
    exp_avg_sq_dtype use_distributed_optimizer
""".split()  # noqa: SIM905
_FIELDS = {
    **{f"--{name.replace('_', '-')}": ("transformer", name) for name in _TRANSFORMER},
    **{f"--{name.replace('_', '-')}": ("optimizer", name) for name in _OPTIMIZER},
    "--decoder-first-pipeline-num-layers": ("transformer", "num_layers_in_first_pipeline_stage"),
    "--decoder-last-pipeline-num-layers": ("transformer", "num_layers_in_last_pipeline_stage"),
    "--overlap-grad-reduce": ("ddp", "overlap_grad_reduce"),
    "--overlap-param-gather": ("ddp", "overlap_param_gather"),
    "--ddp-bucket-size": ("ddp", "bucket_size"),
}
"""Megatron's arguments -> table and field of an engine."""


@joint(_VIRTUAL, "--sequence-parallel", *_LAYOUT, *_FIELDS)
def _megatron(t: Translation) -> None:
    for key in t.current:
        if key == "--sequence-parallel":
            engines.sequence_parallel(t, "actor", key, "--tensor-model-parallel-size")
        elif key in _LAYOUT:
            t.copy(key, f"engines.actor.parallel.{_LAYOUT[key]}")
        elif key in _FIELDS:
            engines.library_field(t, key, "actor", *_FIELDS[key])
    t.copy(_VIRTUAL, "engines.actor.parallel.virtual_pipeline_model_parallel_size", above=0)


@joint("--moe-router-load-balancing-type")
def _balancing(t: Translation) -> None:
    names = {name: name for name in ("aux_loss", "global_aux_loss", "none")}
    reason = "routes a token by its neighbours in the pack; see `moe_router_load_balancing_type`"
    (key,) = t.current
    t.choose(key, "engines.actor.transformer.moe_router_load_balancing_type", names, reason)


def _steps_per_rollout(t: Translation) -> int:
    prompts, mini = t.tree.get("data.prompts_per_step"), t.tree.get("nodes.update.mini_batch")
    return -(-prompts // mini) if isinstance(prompts, int) and isinstance(mini, int) else 1


@joint(
    "--lr --weight-decay --optimizer --lr-decay-style --min-lr --lr-warmup-iters --lr-decay-iters --lr-warmup-fraction",
    always=True,
)
def _learning_rate(t: Translation) -> None:
    t.copy("--lr", "engines.actor.optimizer.lr")
    t.copy("--weight-decay", "engines.actor.optimizer.weight_decay")
    if t.get("--optimizer") != "adam":
        t.copy("--optimizer", "engines.actor.optimizer.optimizer")
    engines.write_shape(t, "actor", "--lr-decay-style")
    t.copy("--min-lr", "engines.actor.lr_schedule.min_lr", above=0)
    engines.write_steps(t, "actor", "lr_warmup_steps", "--lr-warmup-iters", _steps_per_rollout(t))
    engines.write_steps(t, "actor", "lr_decay_steps", "--lr-decay-iters", _steps_per_rollout(t))
    engines.write_warmup_ratio(t, "actor", "--lr-warmup-fraction")


MEGATRON = (
    _megatron,
    refused(
        "is `parallel.virtual_pipeline_model_parallel_size`: layers / stages / this",
        "--num-layers-per-virtual-pipeline-stage",
    ),
    _balancing,
    _learning_rate,
    to("--use-rollout-routing-replay", "engines.actor.router_replay"),
)


_MODEL = """
    spec disable-bias-linear add-qkv-bias qk-layernorm group-query-attention num-attention-heads num-query-groups
    kv-channels num-layers hidden-size ffn-hidden-size use-gated-attention normalization apply-layernorm-1p
    position-embedding-type norm-epsilon rotary-percent rotary-base swiglu untie-embeddings-and-output-weights
    vocab-size
    moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-router-score-function moe-router-topk moe-layer-freq
    num-experts moe-token-drop-policy attention-output-gate moe-shared-expert-gate linear-attention-freq
    linear-conv-kernel-dim linear-key-head-dim linear-value-head-dim linear-num-key-heads linear-num-value-heads
    moe-router-pre-softmax moe-router-enable-expert-bias moe-router-topk-scaling-factor moe-router-num-groups
    moe-router-group-topk multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
    rotary-scaling-factor mscale mscale-all-dim use-rotary-position-embeddings rope-type max-position-embeddings
    seq-length no-position-embedding make-vocab-size-divisible-by post-self-attn-layernorm post-mlp-layernorm
    use-rope-scaling rope-scaling-factor no-rope-fusion moe-shared-expert-overlap window-size window-attn-skip-freq
    padded-vocab-size bf16 model-name megatron-to-hf-mode tokenizer-type tokenizer-model attention-softmax-in-fp32
    rotary-interleaved no-rope-freq moe-latent-size experimental-attention-variant
""".split()  # noqa: SIM905 (a list would take a line for each)
"""Arguments that describe the model: dagrl reads its config.json. bfloat16 softmax is computed in float32."""


MODEL = (
    to("--hf-checkpoint", "model.path"),
    implied(
        "the model's folder has weights and tokenizer; Megatron's are `dist_checkpointing_path`", "--ref-load --load"
    ),
    implied("follows from the model's config.json", *(f"--{name}" for name in _MODEL)),
)


@joint("--global-batch-size --num-steps-per-rollout")
def mini_batch(t: Translation) -> None:
    """Slime counts samples: ``global_batch_size = rollout_batch_size x n / num_steps_per_rollout``."""
    size, steps = "--global-batch-size", "--num-steps-per-rollout"
    prompts, n = t.tree.get("data.prompts_per_step"), t.tree.get("nodes.rollout.n")
    if not isinstance(prompts, int) or not isinstance(n, int):
        return
    key, samples = (size, t.number(size)) if t.number(size) else (steps, None)
    if samples is None and t.number(steps):
        samples = prompts * n // t.number(steps)
    if samples is None:
        return
    if samples % n:
        t.refuse(f"a mini-batch has whole groups: {samples} samples are no multiple of {n}", key)
    else:
        t.write("nodes.update.mini_batch", samples // n, key, note=f"{samples} samples / {n} of each prompt")


@joint("--use-dynamic-batch-size --max-tokens-per-gpu --log-probs-max-tokens-per-gpu --micro-batch-size")
def micro_batches(t: Translation) -> None:
    train, score = "--max-tokens-per-gpu", "--log-probs-max-tokens-per-gpu"
    if not t.flag("--use-dynamic-batch-size"):
        rows = t.number("--micro-batch-size", 1)
        t.imply("rows are always packed by `tokens_per_micro_batch`", "--micro-batch-size", train, score)
        parts.padded_rows(t, "nodes.update.tokens_per_micro_batch", rows, "--micro-batch-size")
        return
    t.imply("rows are always packed by `tokens_per_micro_batch`", "--use-dynamic-batch-size", "--micro-batch-size")
    parallel = t.number("--context-parallel-size", 1)
    note = f"x {parallel} that share each sequence" if parallel > 1 else ""
    for key, nodes in ((train, ("update", "old", "ref")), (score, ("old", "ref"))):
        for node in nodes:
            if t.number(key) and f"nodes.{node}.op" in t.tree:
                t.write(f"nodes.{node}.tokens_per_micro_batch", t.get(key) * parallel, key, note=note)
