"""Gradient buffers, optimizer and learning-rate schedule: Megatron's, with the pipeline's fields.

The sections ``optimizer:`` and ``ddp:`` use Megatron's names; the few fields that dagrl sets are rejected with a hint.
"""

from __future__ import annotations

import math

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import MegatronModule
from megatron.core.utils import get_model_config

from dagrl.backends.families.config_fields import MegatronFields
from dagrl.backends.megatron.engine.config import arguments_of, build_config
from dagrl.backends.megatron.section import LearningRateSpec, MegatronEngineSpec

OPTIMIZER_DEFAULTS: MegatronFields = {"lr": 1e-6, "use_distributed_optimizer": True}
"""Defaults that differ from Megatron's, whose others are Adam, betas 0.9 and 0.999, weight decay 0.01, clipping at 1.0.

The distributed optimizer is on for a single replica too, so that a checkpoint fits any number of replicas.
"""

HYBRID_DEFAULTS: MegatronFields = {"optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True}
"""Further defaults with ``optimizer_cpu_offload``, as in Megatron's command line; `field_rules` has its requirements.

Without the precision-aware optimizer, the float32 weights would also stay on the GPU.
"""


def optimizer_config(spec: MegatronEngineSpec, dtype: torch.dtype) -> OptimizerConfig:
    """Megatron's OptimizerConfig for weights of `dtype`. Raises ValueError if Megatron rejects a field."""
    fixed = {
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        "params_dtype": dtype,
        "min_lr": spec.lr_schedule.min_lr,
        "overlap_param_gather": spec.ddp.get("overlap_param_gather", False),
    }
    if spec.fp8_recipe:
        fixed["fp8_recipe"] = spec.fp8_recipe
    defaults = OPTIMIZER_DEFAULTS | (HYBRID_DEFAULTS if spec.optimizer.get("optimizer_cpu_offload") else {})
    fields = arguments_of(OptimizerConfig, "optimizer", spec.optimizer, defaults=defaults, fixed=fixed)
    return build_config(OptimizerConfig, "optimizer", fields)


def ddp_config(spec: MegatronEngineSpec) -> DistributedDataParallelConfig:
    """Megatron's DistributedDataParallelConfig. Raises ValueError if Megatron rejects a field."""
    fixed = {
        "use_distributed_optimizer": {**OPTIMIZER_DEFAULTS, **spec.optimizer}["use_distributed_optimizer"],
        # Gradients are parts of one global loss.
        "average_in_collective": False,
        "use_megatron_fsdp": False,
        "use_custom_fsdp": False,
    }
    kind = DistributedDataParallelConfig
    defaults = {"grad_reduce_in_fp32": True}
    return build_config(kind, "ddp", arguments_of(kind, "ddp", spec.ddp, defaults=defaults, fixed=fixed))


def wrap_for_training(chunks: list[MegatronModule], ddp: DistributedDataParallelConfig) -> list[MegatronModule]:
    """Give the model's chunks gradient buffers that are reduced over data-parallel ranks.

    Gradients are summed, not averaged, because each rank computes its part of one global loss.
    """
    config = get_model_config(chunks[0])
    # Read when wrapping: with it, gradients are not divided by the number of replicas.
    assert config.calculate_per_token_loss, "gradients would be averaged over replicas"
    config.finalize_model_grads_func = _reduce_gradients
    # Only the first chunk's reduction is on the critical path: the others need no buckets.
    wrapped = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    if ddp.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def make_schedule(optimizer: MegatronOptimizer, spec: LearningRateSpec, *, train_steps: int) -> OptimizerParamScheduler:
    """The learning-rate schedule in pipeline steps: ``step(1)`` precedes a step's optimizer steps.

    The first step of a warmup over W steps has 1/W of the peak, step W the peak, and step ``lr_decay_steps`` has
    ``min_lr``. `train_steps` is the length of the run, also of one that resumes.
    """
    config, warmup_steps = optimizer.config, spec.warmup_steps(train_steps)
    # A run shorter than its warmup never decays, but the scheduler requires decay steps.
    decay_steps = spec.lr_decay_steps or max(train_steps, warmup_steps + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=spec.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=spec.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
    )


def clear_gradients(chunks: list[MegatronModule], optimizer: MegatronOptimizer) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def apply_gradient(optimizer: MegatronOptimizer) -> float:
    """Clip the reduced gradient and update the weights. Returns its norm before clipping. Collective.

    Raises FloatingPointError on every rank, before any weight has changed, if the gradient is not finite.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient is not finite: its norm is {norm}")
    optimizer.step()
    return norm


def gather_parameters(chunks: list[MegatronModule]) -> None:
    """Complete the weights on every rank if gathering was left to overlap with the next forward pass."""
    for chunk in chunks:
        if not chunk.ddp_config.overlap_param_gather:
            continue
        # Waiting for a gather in flight would give the weights from before the step.
        groups = (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
        in_flight = any(group.param_gather_handle is not None for group in groups)
        assert not in_flight, "the forward pass has not waited for all of its weights"
        chunk.start_param_sync(force_sync=True)


def _reduce_gradients(chunks: list[MegatronModule], num_tokens: torch.Tensor | None, **options: object) -> None:
    """Megatron's reduction at the end of a backward pass, without division by a number of tokens."""
    finalize_model_grads(chunks, None, **options)
