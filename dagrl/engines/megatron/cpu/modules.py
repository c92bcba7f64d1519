"""Plain-torch modules under Transformer Engine's class and parameter names, and the spec provider that hands them out.

With them a model built without Transformer Engine has the same parameters as one built with it, so that weights are
converted, and checkpoints read, by one set of names.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from dagrl.engines.megatron.cpu.attention import PackedAttention


def use_plain_modules() -> None:
    """Let megatron's layer specs for Transformer Engine take the modules of this file instead."""
    gpt_layer_specs.TESpecProvider = PlainSpecProvider
    gpt_layer_specs.TENorm = TENorm


class TENorm(torch.nn.RMSNorm):
    """An RMS norm, whose weight is marked as megatron marks those that see only a part of the sequence."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel linear layer behind an RMS norm, which holds its weight as ``layer_norm_weight``."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Normalise over the hidden size, then multiply."""
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(normed, *args, **kwargs)


class PlainSpecProvider(LocalSpecProvider):
    """Stands where megatron asks for Transformer Engine's modules."""

    def fuse_layernorm_and_linear(self) -> bool:
        """As in Transformer Engine, a norm belongs to the linear layer behind it."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """The linear layers that read the residual stream."""
        return TELayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """Norms that stand alone: of queries and keys."""
        return TENorm

    def core_attention(self) -> type:
        """Attention over packed sequences."""
        return PackedAttention
