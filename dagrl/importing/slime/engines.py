"""slime's engines: groups of GPUs, models, layouts, optimizers and micro-batches."""

from __future__ import annotations

from dagrl.importing.engines import library_field, sequence_parallel, write_shape, write_steps, write_warmup_ratio
from dagrl.importing.parts import first_group, padded_rows
from dagrl.importing.slime.common import steps_per_rollout, uses_critic
from dagrl.importing.table import Translation, implied, joint, to


def _groups(t: Translation) -> None:
    nodes, gpus, rollout = "--actor-num-nodes", "--actor-num-gpus-per-node", "--rollout-num-gpus"
    shared = t.flag("--colocate")
    home = "gpus" if shared else "train"
    first_group(t, home, nodes, gpus)
    t.put("engines.generator.group", home if shared else "rollout")
    if shared:
        t.imply("one group for both engines", "--colocate")
        t.imply("generators share the trainer's GPUs", rollout)
    else:
        size, machine = t.number(rollout, 8), t.number("--num-gpus-per-node", 8)
        if size > machine:
            t.put("groups.rollout.nodes", -(-size // machine))
        t.write("groups.rollout.gpus_per_node", min(size, machine), rollout)
    t.imply("machines of a group have the GPUs that it says", "--num-gpus-per-node")
    if uses_critic(t):
        t.put("engines.critic.group", home)
    keys = ("--critic-num-nodes", "--critic-num-gpus-per-node")
    t.refuse("the critic shares the actor's group; `engines.critic.group` names another", *keys)


CLUSTER = (
    joint(
        _groups,
        "--actor-num-nodes --actor-num-gpus-per-node --critic-num-nodes --critic-num-gpus-per-node "
        "--rollout-num-gpus --num-gpus-per-node --colocate",
        always=True,
    ),
)


_PARALLEL = {
    "--tensor-model-parallel-size": "tensor_model_parallel_size",
    "--pipeline-model-parallel-size": "pipeline_model_parallel_size",
    "--context-parallel-size": "context_parallel_size",
    "--expert-model-parallel-size": "expert_model_parallel_size",
    "--expert-tensor-parallel-size": "expert_tensor_parallel_size",
    "--sequence-parallel": "sequence_parallel",
}
_TRANSFORMER = {
    "--decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    **{
        f"--{name.replace('_', '-')}": name
        for name in (
            *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
            *("attention_backend", "moe_grouped_gemm", "moe_permute_fusion", "moe_token_dispatcher_type"),
            *("moe_router_dtype", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"),
            *("moe_layer_recompute", "moe_enable_deepep", "moe_flex_dispatcher_backend", "cross_entropy_loss_fusion"),
            *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
            *("pipeline_model_parallel_layout", "microbatch_group_size_per_virtual_pipeline_stage"),
        )
    },
}
_OPTIMIZER = {
    f"--{name.replace('_', '-')}": name
    for name in (
        *("adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "optimizer_cpu_offload", "optimizer_offload_fraction"),
        *("use_precision_aware_optimizer", "overlap_cpu_optimizer_d2h_h2d", "main_grads_dtype", "main_params_dtype"),
        *("exp_avg_dtype", "exp_avg_sq_dtype", "use_distributed_optimizer"),
    )
}
_DDP = {
    "--overlap-grad-reduce": "overlap_grad_reduce",
    "--overlap-param-gather": "overlap_param_gather",
    "--ddp-bucket-size": "bucket_size",
}


def _megatron(t: Translation) -> None:
    for key in t.current:
        if key == "--sequence-parallel":
            sequence_parallel(t, "actor", key, "--tensor-model-parallel-size")
        elif key in _PARALLEL:
            t.write(f"engines.actor.parallel.{_PARALLEL[key]}", t.get(key), key)
        for table, names in (("transformer", _TRANSFORMER), ("optimizer", _OPTIMIZER), ("ddp", _DDP)):
            if key in names:
                library_field(t, key, "actor", table, names[key])
    layers, virtual = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    if t.number(virtual):
        t.write("engines.actor.parallel.virtual_pipeline_model_parallel_size", t.get(virtual), virtual)
    t.refuse("is `parallel.virtual_pipeline_model_parallel_size`: layers / stages / this", layers)


def _balancing(t: Translation) -> None:
    key = "--moe-router-load-balancing-type"
    if t.get(key) in ("aux_loss", "global_aux_loss", "none"):
        t.write("engines.actor.transformer.moe_router_load_balancing_type", t.get(key), key)
    else:
        t.refuse("routes a token by its neighbours in the pack; see `moe_router_load_balancing_type`", key)


def _learning_rate(t: Translation) -> None:
    t.write("engines.actor.optimizer.lr", t.get("--lr"), "--lr")
    t.write("engines.actor.optimizer.weight_decay", t.get("--weight-decay"), "--weight-decay")
    if t.get("--optimizer", "adam") == "adam":
        t.imply("as by default", "--optimizer")
    else:
        t.write("engines.actor.optimizer.optimizer", t.get("--optimizer"), "--optimizer")
    write_shape(t, "actor", "--lr-decay-style")
    if t.number("--min-lr"):
        t.write("engines.actor.lr_schedule.min_lr", t.get("--min-lr"), "--min-lr")
    write_steps(t, "actor", "lr_warmup_steps", "--lr-warmup-iters", steps_per_rollout(t))
    write_steps(t, "actor", "lr_decay_steps", "--lr-decay-iters", steps_per_rollout(t))
    write_warmup_ratio(t, "actor", "--lr-warmup-fraction")


MEGATRON = (
    joint(
        _megatron,
        "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank",
        *_PARALLEL,
        *_TRANSFORMER,
        *_OPTIMIZER,
        *_DDP,
    ),
    joint(_balancing, "--moe-router-load-balancing-type"),
    joint(
        _learning_rate,
        "--lr --weight-decay --optimizer --lr-decay-style --min-lr --lr-warmup-iters --lr-decay-iters "
        "--lr-warmup-fraction",
        always=True,
    ),
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
"""Arguments that say what the model is: dagrl reads its config.json. bfloat16 softmax is computed in float32."""


MODEL = (
    to("--hf-checkpoint", "model.path"),
    implied(
        "the model's folder has weights and tokenizer; Megatron's are `dist_checkpointing_path`", "--ref-load --load"
    ),
    implied("follows from the model's config.json", *(f"--{name}" for name in _MODEL)),
)


def _mini_batch(t: Translation) -> None:
    """Slime counts samples: ``global_batch_size = rollout_batch_size x n / num_steps_per_rollout``."""
    size, steps = "--global-batch-size", "--num-steps-per-rollout"
    prompts, n = t.tree.get("data.prompts_per_step"), t.tree.get("nodes.rollout.n")
    if not isinstance(prompts, int) or not isinstance(n, int):
        return
    key, samples = (size, t.number(size)) if t.number(size) else (steps, None)
    if samples is None and t.number(steps):
        samples = prompts * n // t.number(steps)
    if samples is None:
        t.imply("one optimizer step a rollout", size, steps)
    elif samples % n:
        t.refuse(f"a mini-batch has whole groups: {samples} samples are no multiple of {n}", key)
    else:
        t.write("nodes.update.mini_batch", samples // n, key, note=f"{samples} samples / {n} of each prompt")
    t.imply("`--global-batch-size` takes its place", steps)


def _tokens(t: Translation) -> None:
    parallel = t.number("--context-parallel-size", 1)
    train, score = "--max-tokens-per-gpu", "--log-probs-max-tokens-per-gpu"
    if not t.flag("--use-dynamic-batch-size"):
        rows = t.number("--micro-batch-size", 1)
        t.imply("rows are always packed by `tokens_per_micro_batch`", "--micro-batch-size", train, score)
        padded_rows(t, "nodes.update.tokens_per_micro_batch", rows, "--micro-batch-size")
        return
    t.imply("rows are always packed by `tokens_per_micro_batch`", "--use-dynamic-batch-size", "--micro-batch-size")
    for key, nodes in ((train, ("update", "old", "ref")), (score, ("old", "ref"))):
        if t.number(key):
            tokens = t.get(key) * parallel
            note = f"x {parallel} that share each sequence" if parallel > 1 else ""
            for node in nodes:
                if node == "update" or f"nodes.{node}.op" in t.tree:
                    t.write(f"nodes.{node}.tokens_per_micro_batch", tokens, key, note=note)


BATCHES = (joint(_mini_batch, "--global-batch-size --num-steps-per-rollout"),)
BATCHES_TOKENS = (
    joint(_tokens, "--use-dynamic-batch-size --max-tokens-per-gpu --log-probs-max-tokens-per-gpu --micro-batch-size"),
)
