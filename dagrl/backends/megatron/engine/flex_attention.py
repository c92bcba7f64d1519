"""Attention over packed sequences whose scores are capped, by torch's FlexAttention: Transformer Engine has no caps.

"Gemma 2" (arXiv 2408.00118) caps the scores of attention, and slides a window along every second layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from dagrl.backends.megatron.engine.cpu.attention import window_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class FlexAttention(MegatronModule):
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
        **unused: object,
    ) -> None:
        super().__init__(config=config)
        assert config.context_parallel_size == 1, "capped attention does not split sequences over ranks"
        scale = softmax_scale if softmax_scale is not None else config.softmax_scale
        self._scale = scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self._window = window_of(config, layer_number)
        self._cap = float(config.attn_logit_softcapping)

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

        Query is [tokens, heads, channels], key and value are [tokens, query groups, channels]. Returns
        [tokens, heads * channels of value].
        """
        assert packed_seq_params is not None, "capped attention needs packed sequences"
        bounds = packed_seq_params.cu_seqlens_q_padded
        if bounds is None:
            bounds = packed_seq_params.cu_seqlens_q
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        attended = _flex_attention()(
            *(q, k, v),
            score_mod=_capped(self._cap, query.device),
            block_mask=_mask_of(packed_seq_params, bounds, len(query), self._window),
            scale=self._scale,
            enable_gqa=query.shape[1] != key.shape[1],
            # For packs of less than 128 tokens, torch would take its kernel for decoding, which does not compile.
            kernel_options={"BACKEND": "TRITON"},
        )
        return attended[0].transpose(0, 1).flatten(1)


@cache
def _flex_attention() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # One kernel for packs of any length.
    return torch.compile(cast("Callable[..., torch.Tensor]", flex_attention), dynamic=True)


@cache
def _capped(cap: float, device: torch.device) -> Callable[..., torch.Tensor]:
    """One object for all layers, so that they share a kernel."""
    # A number would be traced as a symbol with dynamic shapes, and the backward pass takes no symbolic floats.
    limit = torch.tensor(cap, device=device)

    def capped(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return limit * torch.tanh(score / limit)

    return capped


def _mask_of(pack: PackedSeqParams, bounds: torch.Tensor, tokens: int, window: int | None) -> BlockMask:
    """The mask of a pack, made once for all layers with the same window, and reused by recomputation."""
    from torch.nn.attention.flex_attention import create_block_mask

    masks: dict[int | None, BlockMask] = pack.__dict__.setdefault("_block_masks", {})
    if window not in masks:
        places = torch.arange(tokens, device=bounds.device, dtype=bounds.dtype)
        sequence = torch.bucketize(places, bounds[1:], right=True)
        # One mask function, and so one kernel, with and without a window.
        reach = torch.tensor(tokens if window is None else window, device=bounds.device)

        def attends(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (sequence[query] == sequence[key]) & (query >= key) & (query - key <= reach)

        masks[window] = create_block_mask(attends, None, None, tokens, tokens, device=str(bounds.device))
    return masks[window]
