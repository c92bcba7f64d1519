"""Rules for `prefix_sharing` of an engine: what excludes it, and where it may save time."""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.backends.backend import EngineCheck
from dagrl.backends.families.sizes import ModelSizes, sizes_of
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.backends.planning.changes import Change
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.config.errors import Place, removal
from dagrl.model_files.hf_config import read_config


def check_prefix_sharing(check: EngineCheck[MegatronEngineSpec]) -> None:
    """Report an engine that sets it and cannot have it."""
    if check.engine.prefix_sharing and (found := _obstacle(check.engine, check.sizes, check.place)) is not None:
        message, depends = found
        check.findings.error((*check.place, "prefix_sharing"), message, depends_on=[depends])


def shared_prompts(engine: PlannedEngine[MegatronEngineSpec]) -> Iterator[Change]:
    """Yield the change that sets it, if rows share prompts and the engine can have it."""
    spec, place = engine.spec, ("engines", engine.name)
    if spec.prefix_sharing or engine.plan.samples_per_prompt == 1:
        return
    sizes = sizes_of(read_config(engine.pipeline.model_of(engine.name)))
    if _obstacle(spec, sizes, place) is None:
        yield Change({(*place, "prefix_sharing"): True})


def _obstacle(engine: MegatronEngineSpec, sizes: ModelSizes, place: Place) -> tuple[str, Place] | None:
    """Return why the engine cannot have it, and the place of the cause; None if it can."""
    if engine.frozen_copy_of is not None:
        message = f"the model of `{engine.frozen_copy_of}` computes it; set it there, and remove it here"
        return message, ("engines", engine.frozen_copy_of)
    if sizes.bridged:
        return removal(f"models of type {sizes.family} have attention that does not share prefixes"), ("model",)
    if sizes.sees:
        return removal("positions among images are three-dimensional, and not shared"), ("model",)
    if engine.router_replay:
        message = "router_replay sends the tokens of each row where its own routes say; remove one of the two"
        return message, (*place, "router_replay")
    return None
