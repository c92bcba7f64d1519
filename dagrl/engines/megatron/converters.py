"""Who converts weights between Hugging Face and Megatron: dagrl's own tables, or megatron-bridge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from dagrl.engines.base import Bucket
from dagrl.engines.megatron import bridge, hf_weights
from dagrl.engines.model_source import WeightSource
from dagrl.spec.schema import MegatronEngineSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Converter(Protocol):
    """What `hf_weights` and `bridge` have in common. Both functions are collective."""

    def load_hf_weights(
        self, chunks: Sequence[torch.nn.Module], hf_config: PretrainedConfig, source: WeightSource
    ) -> None:
        """Set every parameter of the model from `source`. ValueError for weights that are not this model's."""
        ...

    def export_hf_weights(
        self, chunks: Sequence[torch.nn.Module], hf_config: PretrainedConfig, bucket_bytes: int
    ) -> Iterator[Bucket]:
        """The model's weights in buckets, on rank 0; as many empty ones elsewhere."""
        ...


def choose_converter(hf_config: PretrainedConfig, spec: MegatronEngineSpec) -> Converter:
    """The one that ``spec.bridge`` names. ValueError where it is not installed, or cannot convert the model."""
    if spec.bridge == "native":
        return hf_weights
    bridge.check_bridge(hf_config, spec)
    return bridge
