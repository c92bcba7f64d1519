"""Causal attention over packed sequences in plain torch, which Megatron's own lacks without Transformer Engine.

It has sliding windows, soft-capped scores ("Gemma 2", arXiv 2408.00118) and sinks ("gpt-oss", arXiv 2508.10925). If
queries and keys differ in number, they are aligned at their ends, as in Transformer Engine's bottom-right mask.

Sequences of similar length are padded to the longest and share one call of torch's scaled-dot-product attention. With
context parallelism a rank attends from its own tokens to the gathered keys and values of all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch.nn.functional import scaled_dot_product_attention

from dagrl.backends.megatron.engine.context_parallel import zigzag_index

Offsets = tuple[tuple[int, int, int], ...]
"""Axis, index and count of the parts into which a tensor is divided by layer or expert."""
_SHORT = 32
"""Length up to which all sequences share a call, because another call costs more than padding."""


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
        **unused: object,
    ) -> None:
        super().__init__(config=config)
        scale = softmax_scale if softmax_scale is not None else config.softmax_scale
        self._scale = scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self._window, self._cap = window_of(config, layer_number), getattr(config, "attn_logit_softcapping", None)
        self.softmax_offset = None
        assert config.softmax_type in ("vanilla", "learnable"), f"the CPU has no softmax of type {config.softmax_type}"
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            self.softmax_offset.tensor_model_parallel = True  # type: ignore[attr-defined]
            self.softmax_offset.partition_dim = 0  # type: ignore[attr-defined]
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
        **unused: object,
    ) -> torch.Tensor:
        """Attend within each sequence of the pack.

        Query is [tokens, heads, channels], key and value are [tokens, query groups, channels], for this rank's tokens
        of the pack described by `packed_seq_params`. Returns [tokens, heads * channels of value].
        """
        assert packed_seq_params is not None, "attention on the CPU needs packed sequences"
        lengths, key_lengths = _lengths(packed_seq_params)
        context = None if packed_seq_params.local_cp_size == 1 else self._context
        rank, size = (0, 1) if context is None else (context.rank(), context.size())
        layout = _layout(lengths, key_lengths, rank, size, self._window)
        expected = len(layout.inverse)
        assert expected == len(query), f"{len(query)} tokens where the pack has {expected} for rank {rank} of {size}"
        if context is not None:
            # The backward pass sums the gradients of all ranks' queries.
            both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=context)
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
        dropout = self._dropout if self.training else 0.0
        if self._cap or self.softmax_offset is not None:
            attended = self._attend_by_scores(q, k, v, rectangle.mask, dropout)
        else:
            attended = scaled_dot_product_attention(
                *(q, k, v),
                attn_mask=rectangle.mask,
                dropout_p=dropout,
                is_causal=rectangle.mask is None,
                scale=self._scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)

    def _attend_by_scores(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout: float
    ) -> torch.Tensor:
        """Softmax of scores with a cap or a sink, a logit of each head without a value."""
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        scores = q @ k.transpose(-1, -2) * self._scale
        if self._cap:
            scores = self._cap * torch.tanh(scores / self._cap)
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, -torch.inf)
        if self.softmax_offset is not None:
            sinks = self.softmax_offset.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        shares = scores.softmax(-1)[..., : k.shape[-2]]
        return torch.nn.functional.dropout(shares, dropout) @ v

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, object] | None = None
    ) -> ShardedStateDict:
        tensors = {} if self.softmax_offset is None else {"softmax_offset": self.softmax_offset}
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        return make_sharded_tensors_for_checkpoint(
            *(tensors, prefix, {"softmax_offset": 0}, sharded_offsets),
            tp_group=groups.tp,
            dp_cp_group=metadata["dp_cp_group"],
        )


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Number of earlier tokens to which a token of that layer attends; None for all."""
    window = config.window_size
    if not is_layer_window_attention(window, config.window_attn_skip_freq, layer_number):
        return None
    assert window is not None and tuple(window)[1] == 0, f"causal attention has no window of {window}"
    return None if window[0] < 0 else int(window[0])


def _lengths(pack: PackedSeqParams) -> tuple[tuple[int, ...], tuple[int, ...]]:
    bounds = (
        pack.cu_seqlens_q if pack.cu_seqlens_q_padded is None else pack.cu_seqlens_q_padded,
        pack.cu_seqlens_kv if pack.cu_seqlens_kv_padded is None else pack.cu_seqlens_kv_padded,
    )
    queries, keys = (tuple(ends.diff().tolist()) for ends in bounds)
    return queries, keys


@lru_cache(maxsize=64)
def _layout(
    lengths: tuple[int, ...], key_lengths: tuple[int, ...], rank: int, size: int, window: int | None = None
) -> _Layout:
    """Rectangles for sequences whose queries are the last `lengths` of `key_lengths` tokens.

    Layers with the same `window`, and recomputation, share them. The sequences are divided over `size` ranks as in
    `context_parallel`; queries belong to `rank`.
    """
    length, key_length = torch.tensor(lengths), torch.tensor(key_lengths)
    start, key_start = length.cumsum(0) - length, key_length.cumsum(0) - key_length
    places = [torch.from_numpy(zigzag_index(np.array(key_lengths), other, size)) for other in range(size)]
    gathered = torch.cat(places).argsort()
    held = torch.from_numpy(zigzag_index(np.array(lengths), rank, size))
    held_length, held_start = length // size, start // size
    # The position of each query among the keys of its sequence.
    position = held - (start + length - key_length).repeat_interleave(held_length)
    inverse = torch.empty(len(position), dtype=torch.int64)
    rectangles: list[_Rectangle] = []
    placed = 0
    for alike in _similar(lengths):
        for chosen in _similar(tuple(key_lengths[index] for index in alike)):
            members = [alike[index] for index in chosen]
            keys, _ = _side_by_side(key_start[members], key_length[members])
            queries, real = _side_by_side(held_start[members], held_length[members])
            longest, mask = keys.shape[1], None
            if size > 1 or lengths != key_lengths or (window is not None and window < longest - 1):
                key, query = torch.arange(longest), position[queries].unsqueeze(-1)
                mask = ((key <= query) & (key >= query - (longest if window is None else window))).unsqueeze(1)
            inverse[queries[real]] = placed + real.flatten().nonzero().squeeze(1)
            rectangles.append(_Rectangle(queries.flatten(), gathered[keys].flatten(), len(members), mask))
            placed += queries.numel()
    return _Layout(tuple(rectangles), inverse)


def _side_by_side(start: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the tokens of sequences, int64 [sequences, longest], padded by the last, and a mask of the ones that
    are not padding.
    """
    column, last = torch.arange(int(length.max())), (length - 1).unsqueeze(1)
    return start.unsqueeze(1) + column.minimum(last), column <= last


def _similar(lengths: tuple[int, ...]) -> list[list[int]]:
    """Indices of non-empty sequences, longest first, in groups whose shortest is at least half the longest."""
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
