"""Rules for options of a Megatron engine beside its layout and Megatron's fields, such as head and start weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dagrl.backends.backend import EngineCheck
from dagrl.backends.families.sizes import ModelSizes, sizes_of
from dagrl.backends.megatron.lora_rules import BRIDGE_INSTALL, has_bridge
from dagrl.backends.megatron.planning.stages import stages_of
from dagrl.backends.megatron.report import place_of, report
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.backends.megatron.stored_folder import check_folder, newest_checkpoint
from dagrl.backends.planning.changes import Edit
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.config.errors import Place, listed, removal
from dagrl.model_files.hf_config import read_config


def check_options(check: EngineCheck[MegatronEngineSpec]) -> None:
    engine, sizes, model = check.engine, check.sizes, ("model",)
    if sizes.family is not None and engine.frozen_copy_of is None:
        _check_bridge(check)
    if engine.fused_linear_cross_entropy and engine.head != "lm":
        message = removal(f"a {engine.head} head has no logits to compute in chunks")
        report(check, "fused_linear_cross_entropy", message, "head")
    if engine.fused_linear_cross_entropy and sizes.capped_logits:
        message = removal(f"the logits of {sizes.family} are capped, which is not done in chunks")
        report(check, "fused_linear_cross_entropy", message, model)
    if engine.dist_checkpointing_path is not None:
        _check_start(check, engine.dist_checkpointing_path)
    if engine.ddp.get("nccl_ub"):
        _check_registered_buffers(check)
    if engine.router_replay:
        _check_router_replay(check)
    if engine.prefix_sharing and (obstacle := _obstacle(engine, sizes, check.place)) is not None:
        message, depends = obstacle
        report(check, "prefix_sharing", message, depends)
    if engine.freeze and not sizes.has_vision:
        report(check, "freeze", removal("the model has no vision tower"), model)
    if sizes.added_layers and sizes.layers is not None:
        _check_added_layers(check, sizes.layers.value)


def check_learning_rate(check: EngineCheck[MegatronEngineSpec]) -> None:
    engine, schedule, steps = check.engine, check.engine.lr_schedule, check.pipeline.run.steps
    if "lr" not in engine.optimizer:
        report(check, "optimizer", "a node trains the engine, and it has no learning rate; add `optimizer: {lr: 1e-6}`")
        return
    peak, end, warmup = engine.optimizer["lr"], schedule.lr_decay_steps, schedule.warmup_steps(steps)
    if schedule.min_lr > peak:
        message = f"the floor {schedule.min_lr:g} is above the peak, optimizer.lr = {peak:g}; lower it"
        report(check, "lr_schedule.min_lr", message, "optimizer.lr")
    field = "lr_warmup_steps" if schedule.lr_warmup_ratio is None else "lr_warmup_ratio"
    if schedule.lr_warmup_steps and field == "lr_warmup_ratio":
        message = f"the warm-up already takes {schedule.lr_warmup_steps} steps (lr_warmup_steps); remove one of the two"
        report(check, f"lr_schedule.{field}", message, "lr_schedule.lr_warmup_steps")
    if schedule.lr_decay_style == "constant":
        for option in sorted(schedule.model_fields_set & {"lr_decay_steps", "min_lr"}):
            message = removal("the rate stays constant", "choose another `lr_decay_style`")
            check.findings.warning(place_of(check, f"lr_schedule.{option}"), message, code="constant-learning-rate")
    elif end is None and warmup >= steps:
        message = f"the warm-up takes {warmup} steps and the run {steps} (run.steps); shorten it"
        check.findings.warning(place_of(check, "lr_schedule.lr_decay_style"), message, code="warmup-too-long")
    if end is not None and warmup >= end:
        message = f"the warm-up takes {warmup} steps, and the decay ends at lr_decay_steps = {end}; "
        message += "shorten it, or raise lr_decay_steps"
        report(check, f"lr_schedule.{field}", message, "lr_schedule.lr_decay_steps")


def _check_registered_buffers(check: EngineCheck[MegatronEngineSpec]) -> None:
    message = "registers device memory with NCCL, which cannot be left"
    if check.pipeline.sleeps(check.name):
        others = listed(check.pipeline.neighbours(check.name))
        message += f" while {others} works there; remove it, or say `sleep: false`"
        report(check, "ddp.nccl_ub", message, "sleep", ("groups",))
    elif any(check.engine.offload.model_dump().values()):
        report(check, "ddp.nccl_ub", f"{message}; remove it, or remove `offload`", "offload", ("groups",))


def _check_router_replay(check: EngineCheck[MegatronEngineSpec]) -> None:
    pipeline, engine, sizes, key = check.pipeline, check.engine, check.sizes, "router_replay"
    home = pipeline.engines.get(engine.frozen_copy_of or "")
    if sizes.mixture is False:
        report(check, key, removal("is an option for experts, but the model has no experts"), ("model",))
    elif not sizes.traits.reports_routed_experts:
        report(check, key, removal(f"no generator tells how a {sizes.family} model routes"), ("model",))
    elif engine.head != "lm":
        message = removal(f"routes belong to the policy, and this is a {engine.head} model with its own weights")
        report(check, key, message)
    elif home is not None and not home.replays_routes:
        message = f"it has the model of `{engine.frozen_copy_of}`, which does not set it; set it there too"
        report(check, key, message, ("engines", str(engine.frozen_copy_of), key))
    if engine.transformer.get("moe_router_fusion"):
        message = "the fused router chooses experts by itself; remove one of the two"
        report(check, key, message, "transformer.moe_router_fusion")
    for name, other in pipeline.engines.items():
        if pipeline.wants_routed_experts(name) and not other.reports_routed_experts:
            message = f"`{name}`, a {other.backend} engine, does not tell where it routes tokens; sample with another"
            report(check, key, message, key, ("engines", name))


def _check_bridge(check: EngineCheck[MegatronEngineSpec]) -> None:
    """Report a model of megatron-bridge that cannot be built here, and options that such models do not support."""
    sizes, head, depends = check.sizes, check.engine.head, check.pipeline.model_section(check.name)
    if sizes.traits.bridged and not has_bridge():
        message = f"megatron-bridge builds models of type {sizes.family}, and is not installed; install it with "
        report(check, "", f"{message}`{BRIDGE_INSTALL}`", depends)
    if not sizes.traits.has_tables and head != "lm":
        message = f"models of type {sizes.family} have no {head} head here; use a model of another type for it"
        report(check, "head", message, depends)


def _check_start(check: EngineCheck[MegatronEngineSpec], folder: Path) -> None:
    if check.sizes.linear_heads and not check.sizes.traits.bridged:
        # megatron-bridge centres the norm behind a gated delta net on zero, as Hugging Face does not.
        message = "Megatron folders of models with gated delta nets differ between programs; remove it, and start from "
        report(check, "dist_checkpointing_path", f"{message}the Hugging Face folder", ("model",))
    try:
        folder = newest_checkpoint(folder)
        check_folder(folder)
    except ValueError as error:
        report(check, "dist_checkpointing_path", str(error))
    except OSError as error:
        message = f"{folder} cannot be read ({error.strerror}); check the path and its permissions"
        report(check, "dist_checkpointing_path", message)


def _check_added_layers(check: EngineCheck[MegatronEngineSpec], layers: int) -> None:
    """Report options that are incompatible with the vision tower's additions to the outputs of layers."""
    engine, sizes = check.engine, check.sizes
    if engine.transformer.get("recompute_granularity") == "full":
        message = f"the tower of {sizes.family} adds to the outputs of layers, which cannot be computed again; "
        report(check, "transformer.recompute_granularity", f"{message}choose selective", ("model",))
    try:
        first = len(stages_of(engine, layers)[0].chunks[0])
    except ValueError:
        return  # `layout_rules` reports it.
    if first < sizes.added_layers:
        message = (
            f"the first stage, or its first chunk, has {first} layers, and the tower of {sizes.family} adds to the "
            f"outputs of {sizes.added_layers}; choose fewer stages, or transformer.num_layers_in_first_pipeline_stage"
        )
        report(check, "parallel", message, ("model",))


def shared_prompts(engine: PlannedEngine[MegatronEngineSpec]) -> Iterator[Edit]:
    """Yield ``prefix_sharing``, if rows share prompts and the engine can share prefixes."""
    spec, place = engine.spec, ("engines", engine.name)
    if spec.prefix_sharing or engine.plan.samples_per_prompt == 1:
        return
    sizes = sizes_of(read_config(engine.pipeline.model_of(engine.name)))
    if _obstacle(spec, sizes, place) is None:
        yield Edit({(*place, "prefix_sharing"): True})


def _obstacle(engine: MegatronEngineSpec, sizes: ModelSizes, place: Place) -> tuple[str, Place] | None:
    """Return the reason why an engine cannot share prefixes, and its place; None if it can."""
    if engine.frozen_copy_of is not None:
        message = f"the model of `{engine.frozen_copy_of}` computes it; set it there, and remove it here"
        return message, ("engines", engine.frozen_copy_of)
    if sizes.traits.bridged or not sizes.traits.shares_prefixes:
        return removal(f"models of type {sizes.family} have attention that does not share prefixes"), ("model",)
    if sizes.has_vision:
        return removal("positions among images are three-dimensional, and not shared"), ("model",)
    if engine.router_replay:
        message = "router_replay sends the tokens of each row where its own routes say; remove one of the two"
        return message, (*place, "router_replay")
    return None
