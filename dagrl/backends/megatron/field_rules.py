"""Fields of Megatron's configs that need or exclude each other; Megatron refuses most of these once ranks have started.

`fields.py` has the rules for single fields.
"""

from __future__ import annotations

from dagrl.backends.backend import EngineCheck
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.config.errors import Place, listed, removal, shown
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import Pipeline

_FOR_GPUS = {
    "transformer": ("attention_backend", "fp8"),
    "optimizer": ("use_precision_aware_optimizer", "optimizer_cpu_offload"),
}
"""Fields without an effect, or with a failure, on CPU slots."""
_NEEDS = {
    "use_precision_aware_optimizer": {"use_distributed_optimizer": (True, ""), "optimizer": ("adam", "")},
    "optimizer_cpu_offload": {
        "use_distributed_optimizer": (True, ", whose parts of the weights it works on"),
        "use_precision_aware_optimizer": (True, ", which leaves the float32 weights to it"),
        "optimizer": ("adam", ", as the host has no other"),
        "decoupled_weight_decay": (True, ", as torch's AdamW on the host has it"),
    },
}
"""Fields of ``optimizer:`` with the values that they need in others, and why."""


def check_field_rules(check: EngineCheck[MegatronEngineSpec]) -> None:
    engine, place, findings = check.engine, check.place, check.findings
    _check_recompute(engine, (*place, "transformer"), findings)
    _check_optimizer(engine, place, findings)
    _check_hardware(check.pipeline, engine, place, findings)
    optimizer, stages = engine.optimizer, engine.parallel.pp
    if engine.ddp.get("overlap_param_gather") and not optimizer.get("use_distributed_optimizer", True):
        message = "only the distributed optimizer gathers parameters; set optimizer.use_distributed_optimizer to true"
        where: Place = (*place, "ddp", "overlap_param_gather")
        depends = [(*place, "optimizer", "use_distributed_optimizer")]
        findings.error(where, message, code="needs-distributed-optimizer", depends_on=depends)
    if stages > 1 and engine.transformer.get("moe_token_dispatcher_type") == "allgather":
        message = "stages send each other packs of varying length, which allgather cannot take; choose alltoall"
        where, depends = (*place, "transformer", "moe_token_dispatcher_type"), [(*place, "parallel")]
        findings.error(where, message, code="dispatcher-with-stages", depends_on=depends)


def _check_recompute(engine: MegatronEngineSpec, place: Place, findings: Findings) -> None:
    given = engine.transformer
    granularity: Place = (*place, "recompute_granularity")
    match given.get("recompute_granularity"):
        case "full":
            needed = {"recompute_method": "uniform", "recompute_num_layers": "1"}
            if missing := [field for field in needed if field not in given]:
                added = listed(f"{field}: {needed[field]}" for field in missing)
                message = f"full recomputation needs {' and '.join(missing)} too; add {added}"
                depends = [(*place, field) for field in missing]
                findings.error(granularity, message, code="incomplete-recomputation", depends_on=depends)
            if given.get("moe_layer_recompute"):
                message = "full recomputation includes experts; remove one of the two"
                where: Place = (*place, "moe_layer_recompute")
                findings.error(where, message, code="conflicting-recomputation", depends_on=[granularity])
        case "selective" if "recompute_num_layers" in given:
            message = "selective recomputation names modules, not layers; remove it, and set `recompute_modules`"
            where = (*place, "recompute_num_layers")
            findings.error(where, message, code="conflicting-recomputation", depends_on=[granularity])
        case None:
            for field in ("recompute_method", "recompute_num_layers", "recompute_modules"):
                if field in given:
                    message = removal("nothing is recomputed", "add `recompute_granularity:`")
                    findings.warning((*place, field), message, code="nothing-recomputed", depends_on=[granularity])


def _check_optimizer(engine: MegatronEngineSpec, place: Place, findings: Findings) -> None:
    """Report fields that need others; the engine checks those of Megatron's hybrid optimizer again."""
    given, section = engine.optimizer, (*place, "optimizer")
    for option, needs in _NEEDS.items():
        for field, (needed, why) in needs.items() if given.get(option) else ():
            if given.get(field, needed) != needed:
                message = f"needs {field} to be {shown(needed)}{why}; set it so, or remove this"
                depends: list[Place] = [(*section, field)]
                findings.error((*section, option), message, code="conflicting-optimizer", depends_on=depends)
    if given.get("optimizer_cpu_offload") and engine.transformer.get("bf16") is False:
        message = "needs weights in bfloat16; remove `bf16: false` from `transformer`, or remove this"
        depends = [(*place, "transformer", "bf16")]
        findings.error((*section, "optimizer_cpu_offload"), message, code="conflicting-optimizer", depends_on=depends)
    if given.get("use_precision_aware_optimizer"):
        return
    for field in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if given.get(field, "float32") not in ("float32", "fp32"):
            message = "less than float32 needs the precision-aware optimizer; add `use_precision_aware_optimizer: true`"
            findings.error((*section, field), message, code="needs-precision-aware-optimizer")


def _check_hardware(pipeline: Pipeline, engine: MegatronEngineSpec, place: Place, findings: Findings) -> None:
    group = pipeline.groups.get(engine.group or "")
    if group is None or not group.is_cpu or not group.ranks:
        return
    for section, fields in _FOR_GPUS.items():
        for field in fields:
            if getattr(engine, section).get(field):
                message = removal(f"works on GPUs only, and group `{engine.group}` has CPU slots")
                depends = [("groups", str(engine.group))]
                findings.error((*place, section, field), message, code="needs-gpus", depends_on=depends)
