"""Who converts weights between Hugging Face and Megatron: dagrl's own tables, or megatron-bridge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dagrl.backends.megatron.engine import bridge, export, hf_weights
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.weight_sync.exporter import WeightExporter

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class Converter:
    """What `hf_weights` and `bridge` have in common. Both functions are collective."""

    load_hf_weights: Callable[..., None]
    """Of chunks, Hugging Face's config and a `WeightSource`: set every parameter of the model. ValueError for weights
    that are not this model's."""
    make_exporter: Callable[..., WeightExporter]
    """Of chunks, Hugging Face's config, a number of bytes and a context in which the weights are on the device: gives
    out the model's weights in buckets of about that size."""


def choose_converter(hf_config: PretrainedConfig, spec: MegatronEngineSpec) -> Converter:
    """The one that ``spec.bridge`` names. ValueError where it is not installed, or cannot convert the model."""
    if spec.bridge == "native":
        return Converter(
            partial(hf_weights.load_hf_weights, head=spec.head), partial(export.NativeExporter, head=spec.head)
        )
    bridge.check_bridge(hf_config, spec)
    return Converter(bridge.load_hf_weights, bridge.make_exporter)
