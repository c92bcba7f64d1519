"""Rules for options of a Megatron engine beside its layout and Megatron's fields, such as head and start weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dagrl.backends.backend import EngineCheck
from dagrl.backends.families.sizes import ModelSizes, sizes_of
from dagrl.backends.megatron.lora_rules import BRIDGE_INSTALL, has_bridge
from dagrl.backends.megatron.planning.stages import stages_of
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.backends.megatron.stored_folder import check_folder, newest_checkpoint
from dagrl.backends.planning.changes import Edit
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.config.errors import Place, listed, removal
from dagrl.config.loading.positions import Findings
from dagrl.model_files.hf_config import read_config


def check_options(check: EngineCheck[MegatronEngineSpec]) -> None:
    engine, place, findings = check.engine, check.place, check.findings
    if check.sizes.family is not None and engine.frozen_copy_of is None:
        _check_bridge(check)
    if engine.fused_linear_cross_entropy and engine.head != "lm":
        message = removal(f"a {engine.head} head has no logits to compute in chunks")
        findings.error((*place, "fused_linear_cross_entropy"), message, depends_on=[(*place, "head")])
    if engine.fused_linear_cross_entropy and check.sizes.capped_logits:
        message = removal(f"the logits of {check.sizes.family} are capped, which is not done in chunks")
        findings.error((*place, "fused_linear_cross_entropy"), message, depends_on=[("model",)])
    if engine.dist_checkpointing_path is not None:
        _check_start(engine.dist_checkpointing_path, (*place, "dist_checkpointing_path"), findings)
    if engine.ddp.get("nccl_ub"):
        _check_registered_buffers(check)
    if engine.router_replay:
        _check_router_replay(check)
    _check_prefix_sharing(check)
    _check_vision(check)


def check_learning_rate(check: EngineCheck[MegatronEngineSpec]) -> None:
    engine, place, findings = check.engine, check.place, check.findings
    if "lr" not in engine.optimizer:
        message = "a node trains the engine, and it has no learning rate; add `optimizer: {lr: 1e-6}`"
        findings.error((*place, "optimizer"), message)
        return
    schedule = engine.lr_schedule
    peak, steps, end = engine.optimizer["lr"], check.pipeline.run.steps, schedule.lr_decay_steps
    if schedule.min_lr > peak:
        message = f"the floor {schedule.min_lr:g} is above the peak, optimizer.lr = {peak:g}; lower it"
        findings.error((*place, "lr_schedule", "min_lr"), message, depends_on=[(*place, "optimizer", "lr")])
    warmup = schedule.warmup_steps(steps)
    field = "lr_warmup_steps" if schedule.lr_warmup_ratio is None else "lr_warmup_ratio"
    if schedule.lr_warmup_steps and field == "lr_warmup_ratio":
        message = f"the warm-up already takes {schedule.lr_warmup_steps} steps (lr_warmup_steps); remove one of the two"
        depends = [(*place, "lr_schedule", "lr_warmup_steps")]
        findings.error((*place, "lr_schedule", field), message, depends_on=depends)
    if schedule.lr_decay_style == "constant":
        for option in sorted(schedule.model_fields_set & {"lr_decay_steps", "min_lr"}):
            message = removal("the rate stays constant", "choose another `lr_decay_style`")
            findings.warning((*place, "lr_schedule", option), message, code="constant-learning-rate")
    elif end is None and warmup >= steps:
        message = f"the warm-up takes {warmup} steps and the run {steps} (run.steps); shorten it"
        findings.warning((*place, "lr_schedule", "lr_decay_style"), message, code="warmup-too-long")
    if end is not None and warmup >= end:
        message = (
            f"the warm-up takes {warmup} steps, and the decay ends at lr_decay_steps = {end}; "
            "shorten it, or raise lr_decay_steps"
        )
        depends = [(*place, "lr_schedule", "lr_decay_steps")]
        findings.error((*place, "lr_schedule", field), message, depends_on=depends)


def _check_registered_buffers(check: EngineCheck[MegatronEngineSpec]) -> None:
    """Report memory that is registered with NCCL and would have to be freed."""
    engine, place = check.engine, check.place
    message, depends = "", place
    if check.pipeline.sleeps(check.name):
        others = listed(check.pipeline.neighbours(check.name))
        message = f"registers device memory with NCCL, which cannot be left while {others} works there"
        message, depends = f"{message}; remove it, or say `sleep: false`", (*place, "sleep")
    elif any(engine.offload.model_dump().values()):
        message = "registers device memory with NCCL, which cannot be left; remove it, or remove `offload`"
        depends = (*place, "offload")
    if message:
        check.findings.error((*place, "ddp", "nccl_ub"), message, depends_on=[depends, ("groups",)])


def _check_router_replay(check: EngineCheck[MegatronEngineSpec]) -> None:
    pipeline, engine, sizes, findings = check.pipeline, check.engine, check.sizes, check.findings
    place: Place = (*check.place, "router_replay")
    home = pipeline.engines.get(engine.frozen_copy_of or "")
    if sizes.mixture is False:
        message = removal("is about experts, and the model has none")
        findings.error(place, message, depends_on=[("model",)])
    elif not sizes.traits.reports_routed_experts:
        message = removal(f"no generator tells how a {sizes.family} model routes")
        findings.error(place, message, depends_on=[("model",)])
    elif engine.head != "lm":
        message = removal(f"routes are those of the policy, and this is a {engine.head} model with its own weights")
        findings.error(place, message)
    elif home is not None and not home.replays_routes:
        message = f"its model is that of `{engine.frozen_copy_of}`, which does not; set it there too"
        findings.error(place, message, depends_on=[("engines", str(engine.frozen_copy_of), "router_replay")])
    if engine.transformer.get("moe_router_fusion"):
        message = "the fused router chooses experts by itself; remove one of the two"
        findings.error(place, message, depends_on=[(*check.place, "transformer", "moe_router_fusion")])
    for name, other in pipeline.engines.items():
        if pipeline.wants_routed_experts(name) and not other.reports_routed_experts:
            message = f"`{name}`, a {other.backend} engine, does not tell where it routes tokens; sample with another"
            findings.error(place, message, depends_on=[place, ("engines", name)])


def _check_bridge(check: EngineCheck[MegatronEngineSpec]) -> None:
    """Report a model that megatron-bridge builds where it cannot, and options that such a model does not have."""
    engine, sizes, findings = check.engine, check.sizes, check.findings
    depends: list[Place] = [check.pipeline.model_section(check.name)]
    if sizes.traits.bridged and not has_bridge():
        message = f"megatron-bridge builds models of type {sizes.family}, and is not installed; install it with "
        findings.error(check.place, f"{message}`{BRIDGE_INSTALL}`", depends_on=depends)
    if not sizes.traits.has_tables and engine.head != "lm":
        message = f"models of type {sizes.family} have no {engine.head} head here; use a model of another type for it"
        findings.error((*check.place, "head"), message, depends_on=depends)


def _check_start(folder: Path, place: Place, findings: Findings) -> None:
    """Report a folder that holds no checkpoint in Megatron's distributed format."""
    try:
        folder = newest_checkpoint(folder)
        check_folder(folder)
    except ValueError as error:
        findings.error(place, str(error))
    except OSError as error:
        message = f"{folder} cannot be read ({error.strerror}); check the path and its permissions"
        findings.error(place, message)


def _check_vision(check: EngineCheck[MegatronEngineSpec]) -> None:
    """Report options that need a tower, or that the tower's additions to layers do not allow."""
    engine, sizes, findings = check.engine, check.sizes, check.findings
    if engine.freeze and not sizes.has_vision:
        message = removal("the model has no vision tower")
        findings.error((*check.place, "freeze"), message, depends_on=[("model",)])
    if not sizes.added_layers or sizes.layers is None:
        return
    if engine.transformer.get("recompute_granularity") == "full":
        message = f"the tower of {sizes.family} adds to the outputs of layers, which cannot be computed again; "
        findings.error(
            (*check.place, "transformer", "recompute_granularity"),
            f"{message}choose selective",
            depends_on=[("model",)],
        )
    try:
        first = len(stages_of(engine, sizes.layers.value)[0].chunks[0])
    except ValueError:
        return  # `layout_rules` reports it.
    if first < sizes.added_layers:
        message = (
            f"the first stage, or its first chunk, has {first} layers, and the tower of {sizes.family} adds to the "
            f"outputs of {sizes.added_layers}; choose fewer stages, or transformer.num_layers_in_first_pipeline_stage"
        )
        findings.error((*check.place, "parallel"), message, depends_on=[("model",)])


def _check_prefix_sharing(check: EngineCheck[MegatronEngineSpec]) -> None:
    """Report ``prefix_sharing`` of an engine that cannot share prefixes."""
    if check.engine.prefix_sharing and (found := _obstacle(check.engine, check.sizes, check.place)) is not None:
        message, depends = found
        check.findings.error((*check.place, "prefix_sharing"), message, depends_on=[depends])


def shared_prompts(engine: PlannedEngine[MegatronEngineSpec]) -> Iterator[Edit]:
    """Yield ``prefix_sharing``, if rows share prompts and the engine can share prefixes."""
    spec, place = engine.spec, ("engines", engine.name)
    if spec.prefix_sharing or engine.plan.samples_per_prompt == 1:
        return
    sizes = sizes_of(read_config(engine.pipeline.model_of(engine.name)))
    if _obstacle(spec, sizes, place) is None:
        yield Edit({(*place, "prefix_sharing"): True})


def _obstacle(engine: MegatronEngineSpec, sizes: ModelSizes, place: Place) -> tuple[str, Place] | None:
    """Return why an engine cannot share prefixes, and the place of the cause; None if it can."""
    if engine.frozen_copy_of is not None:
        message = f"the model of `{engine.frozen_copy_of}` computes it; set it there, and remove it here"
        return message, ("engines", engine.frozen_copy_of)
    if sizes.traits.bridged:
        return removal(f"models of type {sizes.family} have attention that does not share prefixes"), ("model",)
    if sizes.has_vision:
        return removal("positions among images are three-dimensional, and not shared"), ("model",)
    if engine.router_replay:
        message = "router_replay sends the tokens of each row where its own routes say; remove one of the two"
        return message, (*place, "router_replay")
    return None
