"""Rules of training in fp8 (``transformer.fp8``), which Transformer Engine refuses late or not at all."""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.backends.backend import EngineCheck
from dagrl.backends.families.registry import model_shape
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec
from dagrl.backends.planning.gpus import gpu_given
from dagrl.config.errors import Place, removal

_MULTIPLE = 16
"""Sides of a matrix product in fp8 must be multiples of it."""


def check_fp8(check: EngineCheck[MegatronEngineSpec]) -> None:
    """Report options, GPUs and models that fp8 does not go with; `field_rules` reports CPUs."""
    place: Place = (*check.place, "transformer", "fp8")
    if check.engine.fp8_recipe is None:
        if "fp8_recipe" in check.engine.transformer:
            message = removal("nothing is computed in fp8", "add `fp8: hybrid`")
            check.findings.error((*check.place, "transformer", "fp8_recipe"), message, code="nothing-in-fp8")
        return
    group = check.pipeline.groups.get(check.engine.group or "")
    if group is not None and group.is_cpu:
        return
    if problem := _of_options(check.engine) or _of_gpu(check) or _of_model(check):
        code, message = problem
        check.findings.error(
            place, message, code=code, depends_on=[("groups",), ("model",), (*check.place, "parallel")]
        )


def _of_options(engine: MegatronEngineSpec) -> tuple[str, str] | None:
    """Return code and message about other options of the engine."""
    if engine.transformer.get("bf16") is False:
        return "fp8-dtype", "is rounded from bfloat16; remove `transformer.bf16: false`, or remove this"
    if engine.lora is not None:
        return "fp8-adapters", "is for training of whole weights, and the engine trains low-rank adapters; remove one"
    return None


def _of_gpu(check: EngineCheck[MegatronEngineSpec]) -> tuple[str, str] | None:
    gpu = gpu_given(check.pipeline, check.engine.group)
    if gpu is None:
        return None
    where = f"{gpu.name} of group `{check.engine.group}` is of the {gpu.generation} generation"
    if not gpu.has_fp8:
        return "fp8-gpu", removal(f"needs GPUs of the Ada, Hopper or Blackwell generation, and {where}")
    if gpu.generation == "Ada" and check.engine.fp8_recipe == "blockwise":
        return "fp8-gpu", f"is blockwise on Hopper and later, and {where}; set `fp8_recipe: tensorwise`"
    return None


def _of_model(check: EngineCheck[MegatronEngineSpec]) -> tuple[str, str] | None:
    try:
        shape = model_shape(check.pipeline.model_of(check.name))
    except ValueError:
        # The rules about models report it.
        return None
    if shape.latent or shape.linear or shape.vision:
        return "fp8-family", removal(f"layers of {shape.family} are not trained in fp8")
    for what, size, ways in _sides(shape, check.engine.parallel):
        if size % (_MULTIPLE * ways):
            parts = f", in {ways} parts," if ways > 1 else ""
            message = removal(f"needs multiples of {_MULTIPLE}, and the model's {what}, {size}{parts} is none")
            return "fp8-sizes", message
    return None


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
