"""Lets megatron-bridge's adapters wrap the plain modules of a machine without Transformer Engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import MegatronModule

from dagrl.backends.megatron.engine.cpu.modules import (
    TELayerNormColumnParallelLinear,
    TELinear,
    TERowParallelGroupedLinear,
)

if TYPE_CHECKING:
    from megatron.bridge.peft.utils import AdapterAttributes


def use_plain_layers() -> None:
    """Replace the function by which megatron-bridge's ``lora`` module, which is imported, asks a layer for its sizes.

    The original needs the classes of Transformer Engine, and fails if Megatron has no replacements.
    """
    from megatron.bridge.peft import lora
    from megatron.bridge.peft.utils import AdapterAttributes

    def attributes(layer: MegatronModule, *args: object, **kwargs: object) -> AdapterAttributes:
        if isinstance(layer, TELayerNormColumnParallelLinear):
            layer.return_layernorm_output = True
        return AdapterAttributes(
            input_is_parallel=isinstance(layer, RowParallelLinear | TERowParallelGroupedLinear),
            in_features=layer.input_size,
            out_features=layer.output_size,
            # As for the layers of shared experts, whose block communicates.
            disable_tensor_parallel_comm=(plain := getattr(layer, "explicit_expert_comm", False)),
            disable_sequence_parallel_comm=plain or not layer.config.sequence_parallel,
            base_linear_is_parallel=not isinstance(layer, TELinear),
        )

    lora.get_adapter_attributes_from_linear = attributes
