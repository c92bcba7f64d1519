"""Rules of servers with ``quantization``, of all backends: GPUs, model, and the parts of a split model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dagrl.backends.backend import EngineCheck
from dagrl.backends.families.base import Family
from dagrl.backends.families.registry import find_family, model_shape
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.planning.gpus import gpu_given
from dagrl.backends.serving.section import ServerSpec
from dagrl.config.errors import Place, removal
from dagrl.config.fp8_weights import BLOCK

_TILE = 16
"""CUTLASS requires multiples of it as rows and columns of matrices in fp8."""


@dataclass(frozen=True, slots=True)
class ServerSplit:
    """The number of ways in which a server splits the matrices of a model."""

    field: str
    """The option to lower."""
    attention: int
    mlp: int
    experts: int
    """Parts of each expert; 1 if experts stay whole."""


def check_fp8(check: EngineCheck[ServerSpec], split: ServerSplit, *, packs_blocks: bool) -> None:
    """Report servers that cannot take weights in fp8.

    `packs_blocks`: on GPUs of the Blackwell generation they store blocks in a different layout from the checkpoint's.
    An engine with whole weights needs no block to be whole.
    """
    engine, place = check.engine, (*check.place, "quantization")
    if engine.quantization is None:
        if engine.modules_to_not_convert:
            message = removal("nothing is quantised", "add `quantization: fp8`")
            check.findings.error((*check.place, "modules_to_not_convert"), message, code="nothing-quantised")
        return
    if problem := next(_problems(check, split, packs_blocks=packs_blocks), None):
        code, message, *depends_on = problem
        check.findings.error(place, message, code=code, depends_on=[place, *depends_on])


def _problems(
    check: EngineCheck[ServerSpec], split: ServerSplit, *, packs_blocks: bool
) -> Iterator[tuple[str, str, *tuple[Place, ...]]]:
    """Yield the code and the message of each problem, and the places that it depends on."""
    engine, groups, model = check.engine, ("groups",), ("model",)
    by_block = engine.quantization == "fp8"
    if engine.weights_from is None:
        message = "is for weights that a trainer sends; remove it: a quantised folder is read as it is"
        yield "fp8-without-trainer", message, groups
    trainer = check.pipeline.engines.get(engine.weights_from or "")
    if trainer is not None and trainer.sent_adapter is not None:
        message = f"quantises whole weights, and `{engine.weights_from}` sends low-rank adapters; "
        yield "fp8-adapters", f"{message}set its `lora.merge: true`, or remove this", groups
    dtype = engine.server.get("dtype")
    if dtype not in (None, "auto", "bfloat16"):
        yield "fp8-dtype", f"multiplies with activations of bfloat16; remove `server.dtype: {dtype}`", groups
    generations = ("Ada", "Hopper") if packs_blocks and by_block else ("Ada", "Hopper", "Blackwell")
    group, gpu = check.pipeline.groups.get(engine.group or ""), gpu_given(check.pipeline, engine.group)
    if group is not None and group.ranks and group.is_cpu:
        yield "fp8-on-cpus", removal(f"works on GPUs only, and group `{engine.group}` has CPU slots"), groups
    if gpu is not None and gpu.generation not in generations:
        known = f"needs GPUs of the {' or '.join(generations)} generation"
        yield "fp8-gpu", removal(f"{known}, and {gpu.name} of group `{engine.group}` is of {gpu.generation}"), groups
    try:
        shape = model_shape(check.pipeline.model_of(check.name))
    except ValueError:
        # The rules about models report it.
        return
    family = find_family(shape.family)
    if family is not None and not _has_plain_layers(family, shape):
        yield "fp8-family", removal(f"layers of {shape.family} are not served in fp8"), model
    if shape.experts is not None and not by_block:
        yield "fp8-experts", "is for models without experts; choose `fp8`", model
    unit, has = (BLOCK, f"has blocks of {BLOCK}") if by_block else (_TILE, f"multiplies tiles of {_TILE}")
    for what, size, ways in _divided(shape, split):
        if size % (unit * ways):
            parts = f" in {ways} parts of {size / ways:g}" if ways > 1 else ""
            lower = f"lower {split.field}" if ways > 1 and size % unit == 0 else ""
            message = removal(f"{has}, and the model's {what}, {size}, is divided{parts} otherwise", lower)
            yield "fp8-blocks", message, model, (*check.place, "server", split.field)


def _has_plain_layers(family: Family, shape: ModelShape) -> bool:
    """Whether `Fp8Weights` covers all linear layers and their tensors."""
    return family.has_tables and not (shape.latent or shape.linear or shape.vision)


def _divided(shape: ModelShape, split: ServerSplit) -> Iterator[tuple[str, int, int]]:
    """Sizes by their names in config.json, each with the number of equal parts that must be whole."""
    yield "hidden_size", shape.hidden, 1
    yield "num_attention_heads * head_dim", shape.heads * shape.head_dim, split.attention
    # A key head that several ranks share is whole on each of them.
    yield (
        "num_key_value_heads * head_dim",
        shape.key_value_heads * shape.head_dim,
        min(split.attention, shape.key_value_heads),
    )
    if not all(map(shape.is_mixture, shape.positions)):
        yield "intermediate_size", shape.dense_width, split.mlp
    if shape.experts is not None:
        yield "moe_intermediate_size", shape.experts.width, split.experts
        if shape.experts.shared_width:
            yield "shared_expert_intermediate_size", shape.experts.shared_width, split.mlp
