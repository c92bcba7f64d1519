"""Causal attention over packed sequences in plain torch: megatron's own refuses them without Transformer Engine.

Sequences of similar length are laid side by side, padded to the longest of them, and go through one call of torch's
scaled-dot-product attention. As attention is causal and the padding stands at the end, no token ever sees it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

_SHORT = 32
"""Sequences up to this length share a call whatever their lengths: a further call costs more than their padding."""


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """Sequences that share a call, each padded to `length`."""

    tokens: torch.Tensor
    """Place in the pack of each token, int64 [sequences * length]; padding repeats its sequence's last token."""
    length: int


@dataclass(frozen=True, slots=True)
class _Layout:
    rectangles: tuple[_Rectangle, ...]
    inverse: torch.Tensor
    """Where each token of the pack stands in the rectangles, laid end to end, int64 [tokens]."""


class PackedAttention(MegatronModule):
    """Core attention of a layer spec, for grouped queries too. Takes the arguments that Transformer Engine's takes."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.context_parallel_size == 1, "attention on the CPU does not split sequences over ranks"
        assert config.window_size is None and config.softmax_type == "vanilla", "only plain attention runs on the CPU"
        self._scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Attend within each sequence of the pack.

        Query is [tokens, heads, channels], key and value are [tokens, query groups, channels]. Returns
        [tokens, heads * channels].
        """
        assert packed_seq_params is not None, "attention on the CPU takes packed sequences only"
        bounds = packed_seq_params.cu_seqlens_q_padded
        if bounds is None:
            bounds = packed_seq_params.cu_seqlens_q
        layout = _layout(tuple(bounds.diff().tolist()))
        assert len(layout.inverse) == len(query), f"{len(query)} tokens in sequences of {len(layout.inverse)} tokens"
        parts = [self._attend(query, key, value, rectangle) for rectangle in layout.rectangles]
        return torch.cat(parts).index_select(0, layout.inverse)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rectangle: _Rectangle
    ) -> torch.Tensor:
        q, k, v = (
            tensor.index_select(0, rectangle.tokens).unflatten(0, (-1, rectangle.length)).transpose(1, 2)
            for tensor in (query, key, value)
        )
        attended = scaled_dot_product_attention(
            *(q, k, v),
            dropout_p=self._dropout if self.training else 0.0,
            is_causal=True,
            scale=self._scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)


@lru_cache(maxsize=64)
def _layout(lengths: tuple[int, ...]) -> _Layout:
    """Rectangles for sequences of these lengths; all layers of a pass share it, and its recomputation does."""
    length = torch.tensor(lengths)
    start = length.cumsum(0) - length
    inverse = torch.empty(sum(lengths), dtype=torch.int64)
    rectangles: list[_Rectangle] = []
    placed = 0
    for members in _similar(lengths):
        longest = lengths[members[0]]
        column, lasts = torch.arange(longest), (length[members] - 1).unsqueeze(1)
        tokens = (start[members].unsqueeze(1) + column.minimum(lasts)).flatten()
        real = (column <= lasts).flatten()
        inverse[tokens[real]] = placed + real.nonzero().squeeze(1)
        rectangles.append(_Rectangle(tokens, longest))
        placed += len(tokens)
    return _Layout(tuple(rectangles), inverse)


def _similar(lengths: tuple[int, ...]) -> list[list[int]]:
    """Indices of non-empty sequences, longest first, cut where one is shorter than half of its group's longest."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not lengths[index]:
            continue
        longest = lengths[groups[-1][0]] if groups else math.inf
        if groups and (2 * lengths[index] > longest or longest <= _SHORT):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
