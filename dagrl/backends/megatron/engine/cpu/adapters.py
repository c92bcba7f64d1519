"""Lets megatron-bridge's adapters wrap the plain modules of a machine without Transformer Engine."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import RowParallelLinear

from dagrl.backends.megatron.engine.cpu.modules import (
    TELayerNormColumnParallelLinear,
    TELinear,
    TERowParallelGroupedLinear,
)


def use_plain_layers(lora: Any) -> None:
    """Replace the function by which `lora`, megatron-bridge's module, asks a layer for its sizes.

    It needs the classes of Transformer Engine, and fails where Megatron has none in their place.
    """

    def attributes(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(layer, TELayerNormColumnParallelLinear):
            layer.return_layernorm_output = True
        return AdapterAttributes(
            input_is_parallel=isinstance(layer, RowParallelLinear | TERowParallelGroupedLinear),
            in_features=layer.input_size,
            out_features=layer.output_size,
            # As for the layers of shared experts, whose communication is their block's.
            disable_tensor_parallel_comm=(plain := getattr(layer, "explicit_expert_comm", False)),
            disable_sequence_parallel_comm=plain or not layer.config.sequence_parallel,
            base_linear_is_parallel=not isinstance(layer, TELinear),
        )

    from megatron.bridge.peft.utils import AdapterAttributes

    lora.get_adapter_attributes_from_linear = attributes
