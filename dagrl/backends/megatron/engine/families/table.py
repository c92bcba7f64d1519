"""The shape of a family's table. `dense`, `mixture` and `latent` fill tables in, the package's functions read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dagrl.backends.megatron.engine.tensor_maps import TensorMap

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One Megatron parameter and the Hugging Face tensors in it.

    Layers and experts have the numbers that they have in the whole model. In a table both names are without the layer's
    prefix, and ``{expert}`` stands for each expert's number.
    """

    megatron: str
    hf: tuple[str, ...]
    map: TensorMap
    buffer: bool = False
    """A float32 buffer, in any model: no gradient moves it."""
    layer: int | None = None
    expert: int | None = None
    with_the_one_before: bool = False
    """Generators join it with the tensor before it as they take it in: the two must come together."""


Maps = tuple[MappedTensor, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one architecture."""

    fields: Callable[[PretrainedConfig], dict[str, Any]]
    """TransformerConfig fields that the architecture fixes, beyond those of all families."""
    layer: Callable[[PretrainedConfig, int], Maps]
    """The tensors of the layer of that index."""
    rope: Callable[[PretrainedConfig], dict[str, Any]] | None = None
    """GPTModel's keyword arguments for the rotary embedding, where they are not those of most families."""
    experts: Callable[[PretrainedConfig], int] = lambda config: 0
    """How many a mixture layer has."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """TransformerConfig fields that a pipeline file may change."""
    latent: bool = False
    """Whether attention is latent, which has a config class of its own."""
