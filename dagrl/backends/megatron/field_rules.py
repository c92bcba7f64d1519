"""Fields of Megatron's configs that need or exclude each other, and training in fp8 (``transformer.fp8``).

Megatron and Transformer Engine refuse these late or not at all. `fields.py` has the rules for single fields.
"""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.backends.backend import EngineCheck
from dagrl.backends.families.registry import model_shape
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.report import place_of, report
from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec
from dagrl.backends.planning.gpus import gpu_given
from dagrl.config.errors import listed, removal, shown

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
        "decoupled_weight_decay": (True, ", as in torch's AdamW on the host"),
    },
}
"""Fields of ``optimizer:`` -> required values of other fields, and the reason."""


def check_field_rules(check: EngineCheck[MegatronEngineSpec]) -> None:
    _check_recompute(check)
    _check_optimizer(check)
    _check_hardware(check)
    engine = check.engine
    if engine.ddp.get("overlap_param_gather") and not engine.optimizer.get("use_distributed_optimizer", True):
        message = "only the distributed optimizer gathers parameters; set optimizer.use_distributed_optimizer to true"
        depends, code = "optimizer.use_distributed_optimizer", "needs-distributed-optimizer"
        report(check, "ddp.overlap_param_gather", message, depends, code=code)
    if engine.parallel.pp > 1 and engine.transformer.get("moe_token_dispatcher_type") == "allgather":
        message = "stages send each other packs of varying length, which allgather cannot take; choose alltoall"
        report(check, "transformer.moe_token_dispatcher_type", message, "parallel", code="dispatcher-with-stages")


def _check_recompute(check: EngineCheck[MegatronEngineSpec]) -> None:
    given, granularity = check.engine.transformer, "transformer.recompute_granularity"
    match given.get("recompute_granularity"):
        case "full":
            needed = {"recompute_method": "uniform", "recompute_num_layers": "1"}
            if missing := [field for field in needed if field not in given]:
                added = listed(f"{field}: {needed[field]}" for field in missing)
                message = f"full recomputation needs {' and '.join(missing)} too; add {added}"
                depends = (f"transformer.{field}" for field in missing)
                report(check, granularity, message, *depends, code="incomplete-recomputation")
            if given.get("moe_layer_recompute"):
                message = "full recomputation includes experts; remove one of the two"
                report(check, "transformer.moe_layer_recompute", message, granularity, code="conflicting-recomputation")
        case "selective" if "recompute_num_layers" in given:
            message = "selective recomputation names modules, not layers; remove it, and set `recompute_modules`"
            report(check, "transformer.recompute_num_layers", message, granularity, code="conflicting-recomputation")
        case None:
            for field in ("recompute_method", "recompute_num_layers", "recompute_modules"):
                if field in given:
                    message = removal("nothing is recomputed", "add `recompute_granularity:`")
                    place, depends_on = place_of(check, f"transformer.{field}"), [place_of(check, granularity)]
                    check.findings.warning(place, message, code="nothing-recomputed", depends_on=depends_on)


def _check_optimizer(check: EngineCheck[MegatronEngineSpec]) -> None:
    given = check.engine.optimizer
    for option, needs in _NEEDS.items():
        for field, (needed, why) in needs.items() if given.get(option) else ():
            if given.get(field, needed) != needed:
                message = f"needs {field} to be {shown(needed)}{why}; set it so, or remove this"
                report(check, f"optimizer.{option}", message, f"optimizer.{field}", code="conflicting-optimizer")
    if given.get("optimizer_cpu_offload") and check.engine.transformer.get("bf16") is False:
        message = "needs weights in bfloat16; remove `bf16: false` from `transformer`, or remove this"
        report(check, "optimizer.optimizer_cpu_offload", message, "transformer.bf16", code="conflicting-optimizer")
    if given.get("use_precision_aware_optimizer"):
        return
    for field in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if given.get(field, "float32") not in ("float32", "fp32"):
            message = "less than float32 needs the precision-aware optimizer; add `use_precision_aware_optimizer: true`"
            report(check, f"optimizer.{field}", message, code="needs-precision-aware-optimizer")


def _check_hardware(check: EngineCheck[MegatronEngineSpec]) -> None:
    name = check.engine.group
    group = check.pipeline.groups.get(name or "")
    if group is None or not group.is_cpu or not group.ranks:
        return
    for section, fields in _FOR_GPUS.items():
        for field in fields:
            if getattr(check.engine, section).get(field):
                message = removal(f"works on GPUs only, and group `{name}` has CPU slots")
                report(check, f"{section}.{field}", message, ("groups", str(name)), code="needs-gpus")


_MULTIPLE = 16
"""Sides of a matrix product in fp8 must be multiples of it."""


def check_fp8(check: EngineCheck[MegatronEngineSpec]) -> None:
    """Report options, GPUs and models that are incompatible with fp8; `_check_hardware` reports CPUs."""
    if check.engine.fp8_recipe is None:
        if "fp8_recipe" in check.engine.transformer:
            message = removal("nothing is computed in fp8", "add `fp8: hybrid`")
            report(check, "transformer.fp8_recipe", message, code="nothing-in-fp8")
        return
    group = check.pipeline.groups.get(check.engine.group or "")
    if group is not None and group.is_cpu:
        return
    for code, message in _faults(check):
        report(check, "transformer.fp8", message, ("groups",), ("model",), "parallel", code=code)
        return


def _faults(check: EngineCheck[MegatronEngineSpec]) -> Iterator[tuple[str, str]]:
    """Yield code and message: other options, the GPU, the model."""
    engine, gpu = check.engine, gpu_given(check.pipeline, check.engine.group)
    if engine.transformer.get("bf16") is False:
        yield "fp8-dtype", "is rounded from bfloat16; remove `transformer.bf16: false`, or remove this"
    if engine.lora is not None:
        message = "is for training of whole weights, and the engine trains low-rank adapters; remove one"
        yield "fp8-adapters", message
    if gpu is not None:
        where = f"{gpu.name} of group `{engine.group}` is of the {gpu.generation} generation"
        if not gpu.has_fp8:
            yield "fp8-gpu", removal(f"needs GPUs of the Ada, Hopper or Blackwell generation, and {where}")
        if gpu.generation == "Ada" and engine.fp8_recipe == "blockwise":
            yield "fp8-gpu", f"is blockwise on Hopper and later, and {where}; set `fp8_recipe: tensorwise`"
    try:
        shape = model_shape(check.pipeline.model_of(check.name))
    except ValueError:
        return  # The rules about models report it.
    if shape.latent or shape.linear or shape.vision:
        yield "fp8-family", removal(f"layers of {shape.family} are not trained in fp8")
    for what, size, ways in _sides(shape, engine.parallel):
        if size % (_MULTIPLE * ways):
            parts = f", in {ways} parts," if ways > 1 else ""
            yield "fp8-sizes", removal(f"needs multiples of {_MULTIPLE}, and the model's {what}, {size}{parts} is none")


def _sides(shape: ModelShape, parallel: ParallelSpec) -> Iterator[tuple[str, int, int]]:
    """Sizes by their names in config.json, each with the number of equal parts that must be multiples."""
    tensor = parallel.tp
    yield "hidden_size", shape.hidden, 1
    yield "num_attention_heads * head_dim", shape.heads * shape.head_dim, tensor
    yield "num_key_value_heads * head_dim", shape.key_value_heads * shape.head_dim, 1
    if not all(map(shape.is_mixture, shape.positions)):
        yield "intermediate_size", shape.dense_width, tensor
    if shape.experts is not None:
        yield "moe_intermediate_size", shape.experts.width, parallel.etp
        if shape.experts.shared_width:
            yield "shared_expert_intermediate_size", shape.experts.shared_width, tensor
