"""Warnings about options of a Megatron engine that another option turns off."""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.backends.backend import EngineCheck
from dagrl.backends.megatron.layout_rules import UNEVEN_FIELDS
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.config.errors import Place
from dagrl.config.schema import Pipeline

_RECOMPUTE = ("recompute_method", "recompute_num_layers", "recompute_modules")
_OFFLOADED = ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params")
_OF_ADAM = ("adam_beta1", "adam_beta2", "adam_eps", "decoupled_weight_decay")


def warn_of_unused_fields(check: EngineCheck[MegatronEngineSpec]) -> None:
    """Warn of options that have no effect."""
    for where, why in (*_unread_fields(check.engine), *_unread_rates(check.pipeline, check.engine)):
        place: Place = (*check.place, *where)
        check.findings.warning(place, f"has no effect, {why}", depends_on=[place[:3]])


def _unread_fields(engine: MegatronEngineSpec) -> Iterator[tuple[Place, str]]:
    """Fields of Megatron's configs that depend on another one, and why that turns them off."""
    transformer, optimizer = engine.transformer, engine.optimizer
    if transformer.get("recompute_granularity") is None:
        for field in _RECOMPUTE:
            if transformer.get(field) is not None:
                yield ("transformer", field), "as nothing is recomputed; add `recompute_granularity:`, or take it out"
    if engine.parallel.pipeline_model_parallel_size == 1:
        for field in UNEVEN_FIELDS:
            if transformer.get(field):
                yield ("transformer", field), "as there is one pipeline stage; take it out"
    if not optimizer.get("optimizer_cpu_offload"):
        for field in _OFFLOADED:
            if field in optimizer:
                yield (
                    ("optimizer", field),
                    "as the optimizer is on the GPU; add `optimizer_cpu_offload: true`, or take it out",
                )
    adam = optimizer.get("optimizer", "adam") == "adam"
    for field in ("sgd_momentum",) if adam else _OF_ADAM:
        if field in optimizer:
            yield ("optimizer", field), f"as the optimizer is {'adam' if adam else 'sgd'}; take it out"
    if engine.ddp.get("bucket_size") is not None and not engine.ddp.get("overlap_grad_reduce"):
        yield ("ddp", "bucket_size"), "as gradients travel at once; add `overlap_grad_reduce: true`, or take it out"


def _unread_rates(pipeline: Pipeline, engine: MegatronEngineSpec) -> Iterator[tuple[Place, str]]:
    """What a schedule of learning rates never comes to."""
    schedule, steps = engine.lr_schedule, pipeline.run.steps
    if schedule.lr_decay_style == "constant":
        for field in ("lr_decay_steps", "min_lr"):
            if field in schedule.model_fields_set:
                yield (
                    ("lr_schedule", field),
                    "as the rate stays constant; choose another `lr_decay_style`, or take it out",
                )
    elif schedule.lr_decay_steps is None and schedule.lr_warmup_steps >= steps:
        yield (
            ("lr_schedule", "lr_decay_style"),
            f"as the warm-up takes {schedule.lr_warmup_steps} steps and the run {steps} (run.steps); shorten it",
        )
