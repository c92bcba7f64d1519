"""Causal attention over packed sequences in plain torch, which Megatron's own lacks without Transformer Engine.

Sequences of similar length are padded to the longest and share one call of torch's scaled-dot-product attention. As
attention is causal and padding is at the end, no token attends to it.

With context parallelism a rank attends from its own tokens to the gathered keys and values of all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from dagrl.backends.megatron.engine.context_parallel import zigzag_index

_SHORT = 32
"""Length up to which sequences share a call whatever their lengths, because another call costs more than padding."""


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """Sequences that share a call: S of them, padded to Q tokens of the rank and K of all ranks."""

    queries: torch.Tensor
    """Index of each token among the rank's, int64 [S * Q]; padding repeats the last token of its sequence."""
    keys: torch.Tensor
    """Index of each token among all ranks', concatenated, int64 [S * K]; padding as in queries."""
    sequences: int
    mask: torch.Tensor | None
    """True where a query attends to a key, bool [S, 1, Q, K]; None if a rank holds all tokens and is_causal
    suffices.
    """


@dataclass(frozen=True, slots=True)
class _Layout:
    rectangles: tuple[_Rectangle, ...]
    inverse: torch.Tensor
    """Index of each of the rank's tokens in the concatenated rectangles, int64 [tokens of the rank]."""


class PackedAttention(MegatronModule):
    """Core attention of a layer spec, with grouped queries. Same arguments as Transformer Engine's."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.window_size is None and config.softmax_type == "vanilla", "the CPU supports only plain attention"
        self._scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self._context = None
        if config.context_parallel_size > 1:
            groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
            self._context = groups.cp

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

        Query is [tokens, heads, channels], key and value are [tokens, query groups, channels], for this rank's tokens
        of the pack described by `packed_seq_params`. Returns [tokens, heads * channels of value].
        """
        assert packed_seq_params is not None, "attention on the CPU needs packed sequences"
        bounds = packed_seq_params.cu_seqlens_q_padded
        if bounds is None:
            bounds = packed_seq_params.cu_seqlens_q
        rank, size = (0, 1) if self._context is None else (self._context.rank(), self._context.size())
        layout = _layout(tuple(bounds.diff().tolist()), rank, size)
        expected = len(layout.inverse)
        assert expected == len(query), f"{len(query)} tokens where the pack has {expected} for rank {rank} of {size}"
        if self._context is not None:
            # The backward pass sums the gradients of all ranks' queries.
            both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self._context)
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        parts = [self._attend(query, key, value, rectangle) for rectangle in layout.rectangles]
        return torch.cat(parts).index_select(0, layout.inverse)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rectangle: _Rectangle
    ) -> torch.Tensor:
        q, k, v = (
            tensor.index_select(0, places).unflatten(0, (rectangle.sequences, -1)).transpose(1, 2)
            for tensor, places in ((query, rectangle.queries), (key, rectangle.keys), (value, rectangle.keys))
        )
        attended = scaled_dot_product_attention(
            *(q, k, v),
            attn_mask=rectangle.mask,
            dropout_p=self._dropout if self.training else 0.0,
            is_causal=rectangle.mask is None,
            scale=self._scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)


@lru_cache(maxsize=64)
def _layout(lengths: tuple[int, ...], rank: int, size: int) -> _Layout:
    """Rectangles for sequences of these lengths, shared by all layers of a pass and by recomputation.

    The sequences are divided over `size` ranks as in `context_parallel`; queries are those of `rank`.
    """
    length = torch.tensor(lengths)
    start = length.cumsum(0) - length
    places = [torch.from_numpy(zigzag_index(np.array(lengths), other, size)) for other in range(size)]
    gathered = torch.cat(places).argsort()
    held_length, held_start = length // size, start // size
    position = places[rank] - start.repeat_interleave(held_length)
    inverse = torch.empty(len(position), dtype=torch.int64)
    rectangles: list[_Rectangle] = []
    placed = 0
    for members in _similar(lengths):
        keys, _ = _side_by_side(start[members], length[members])
        queries, real = _side_by_side(held_start[members], held_length[members])
        mask = None
        if size > 1:
            mask = (torch.arange(keys.shape[1]) <= position[queries].unsqueeze(-1)).unsqueeze(1)
        inverse[queries[real]] = placed + real.flatten().nonzero().squeeze(1)
        rectangles.append(_Rectangle(queries.flatten(), gathered[keys].flatten(), len(members), mask))
        placed += queries.numel()
    return _Layout(tuple(rectangles), inverse)


def _side_by_side(start: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the tokens of sequences, padded to the longest, int64 [sequences, longest], and which are not padding.

    Padding repeats its sequence's last token.
    """
    column, last = torch.arange(int(length.max())), (length - 1).unsqueeze(1)
    return start.unsqueeze(1) + column.minimum(last), column <= last


def _similar(lengths: tuple[int, ...]) -> list[list[int]]:
    """Indices of non-empty sequences, longest first, in groups whose shortest is at least half as long as the
    longest.
    """
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
