"""Low-rank adapters ("LoRA", arXiv 2106.09685): the ``lora:`` section, and the tensors of a model's adapters.

An adapted layer computes ``W x + alpha / rank * B A x``. `A` is [rank, inputs] and `B` is [outputs, rank]. Layers that
Megatron fuses (query, key and value; gate and up projection) share one `A`, as in megatron-bridge's ``LoRA``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dagrl.backends.families.tensor_maps import MappedTensor, Parallel, Repeated, Replicated
from dagrl.config.schema.section import PositiveInt, Section

ADAPTER = ".adapter."
"""Part of the Megatron name of each adapter's tensor."""
_WEIGHT = re.compile(r"(?P<module>.*\.(?P<layer>linear_\w+))\.weight(?P<expert>\d*|\{expert\})")


Layer = Literal[
    "linear_qkv",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
]
"""Megatron's name of a linear layer."""
PLAIN_LAYERS: tuple[Layer, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
LATENT_LAYERS: tuple[Layer, ...] = (
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
    *PLAIN_LAYERS[1:],
)
"""Layers of models with latent attention."""


class LoraSpec(Section):
    """Train low-rank adapters, and freeze the model's own weights."""

    rank: PositiveInt = 32
    """Columns of `B` and rows of `A`; tensor-parallel ranks share them."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapter's output is multiplied by ``alpha / rank``."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that an update zeroes."""
    target_modules: Literal["all-linear"] | list[Layer] = "all-linear"
    """Megatron's names of the adapted layers: ``[linear_qkv, linear_proj, linear_fc1, linear_fc2]``. Default: all
    linear layers, including experts, without embedding, router and output layer."""
    merge: bool = True
    """Send merged weights to generators. False sends the adapters alone, to generators that load the model's weights
    themselves."""
    init: Literal["kaiming", "xavier", "normal"] = "kaiming"
    """Initial distribution of `A`: uniform in ±1/√inputs as in PEFT, Glorot's normal one, or normal with a standard
    deviation of 1/rank. `B` starts as zeros."""

    path: Path | None = None
    """A folder written by PEFT or ``dagrl export --adapter``, with initial adapters in place of random ones. Rank,
    alpha and layers must match it."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapts(self, tensor: MappedTensor) -> bool:
        """Whether the layer with this weight has an adapter."""
        layer = layer_name(tensor)
        return layer is not None and (self.target_modules == "all-linear" or layer in self.target_modules)


@dataclass(frozen=True, slots=True)
class Adapter:
    """The tensors of one adapter: `A` and `B` for each Hugging Face tensor of the layer."""

    base: MappedTensor
    """The weight of the adapted layer."""
    a: MappedTensor
    """One parameter, which all of the layer's Hugging Face tensors share."""
    b: MappedTensor

    @property
    def numel(self) -> int:
        return math.prod(self.a.shapes[0]) + self.b.numel


def layer_name(tensor: MappedTensor) -> str | None:
    """Megatron's name of the linear layer whose weight the tensor is; None for other tensors."""
    match = _WEIGHT.fullmatch(tensor.megatron)
    return match["layer"] if match and tensor.is_linear else None


def adapters(tensors: Iterable[MappedTensor], lora: LoraSpec) -> Iterator[Adapter]:
    """Yield the adapter of each adapted layer, in the order of the base's `tensors`."""
    for base in tensors:
        match = _WEIGHT.fullmatch(base.megatron)
        if match is None or not lora.adapts(base):
            continue
        outputs, inputs = [shape[0] for shape in base.shapes], base.shapes[0][1]
        by_rows, whole = base.map == Parallel(1), isinstance(base.map, Replicated)
        names = [f"{match['module']}{ADAPTER}linear_{side}.weight{match['expert']}" for side in ("in", "out")]
        modules = [name.removesuffix(".weight") for name in base.hf]
        a = replace(
            base,
            megatron=names[0],
            hf=tuple(f"{module}.lora_A.weight" for module in modules),
            shapes=((lora.rank, inputs),) * len(modules),
            map=Repeated(base.map if by_rows or whole else Parallel(0)),
        )
        b = replace(
            base,
            megatron=names[1],
            hf=tuple(f"{module}.lora_B.weight" for module in modules),
            shapes=tuple((rows, lora.rank) for rows in outputs),
            # The adapter of a row-parallel layer also splits its outputs, and gathers them.
            map=Parallel(0) if by_rows else base.map,
        )
        yield Adapter(base, a, b)
