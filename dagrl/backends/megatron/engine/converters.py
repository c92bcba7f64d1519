"""Selects the converter between Hugging Face and Megatron weights: dagrl's own, or megatron-bridge."""

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
    """Interface of `hf_weights` and `bridge`. Both functions are collective."""

    load_hf_weights: Callable[..., None]
    """(chunks, Hugging Face config, WeightSource): set every parameter of the model. Raises ValueError for weights of
    another model."""
    make_exporter: Callable[..., WeightExporter]
    """(chunks, Hugging Face config, bucket bytes, context with the weights on the device): make an exporter of the
    model's weights."""


def choose_converter(hf_config: PretrainedConfig, spec: MegatronEngineSpec) -> Converter:
    """The converter named by ``spec.bridge``. Raises ValueError if it is not installed, or cannot convert the model."""
    if spec.bridge == "native":
        return Converter(
            partial(hf_weights.load_hf_weights, head=spec.head), partial(export.NativeExporter, head=spec.head)
        )
    bridge.check_bridge(hf_config, spec)
    return Converter(bridge.load_hf_weights, bridge.make_exporter)
