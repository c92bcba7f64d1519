"""Megatron-LM's arguments of slime: layout, transformer, optimizer and learning rate."""

from __future__ import annotations

from dagrl.importing.engines import NO_SUCH_SHAPE, library_field, sequence_parallel, write_warmup_ratio
from dagrl.importing.slime.common import steps_per_rollout
from dagrl.importing.table import Translation, joint, to

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
    style = t.get("--lr-decay-style")
    schedule = "engines.actor.lr_schedule"
    if style in ("constant", "linear", "cosine", "inverse-square-root"):
        t.write(f"{schedule}.lr_decay_style", style, "--lr-decay-style")
    else:
        t.refuse(NO_SUCH_SHAPE, "--lr-decay-style")
    if t.number("--min-lr"):
        t.write(f"{schedule}.min_lr", t.get("--min-lr"), "--min-lr")
    each = steps_per_rollout(t)
    for key, target in (("--lr-warmup-iters", "lr_warmup_steps"), ("--lr-decay-iters", "lr_decay_steps")):
        if t.number(key):
            note = f"optimizer steps there, {each} a step" if each > 1 else ""
            t.write(f"{schedule}.{target}", -(-t.get(key) // each), key, note=note)
    write_warmup_ratio(t, "actor", "--lr-warmup-fraction")


RULES = (
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
