"""Options of a Megatron engine whose model has a vision tower."""

from __future__ import annotations

from dagrl.backends.backend import EngineCheck
from dagrl.backends.megatron.planning.stages import stages_of
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.config.errors import removal


def check_vision(check: EngineCheck[MegatronEngineSpec]) -> None:
    """Report options that need a tower, or that the tower's additions to layers do not allow."""
    engine, sizes, findings = check.engine, check.sizes, check.findings
    if engine.freeze and not sizes.sees:
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
