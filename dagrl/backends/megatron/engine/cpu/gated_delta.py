"""The kernels of gated delta nets ("Gated Delta Networks", arXiv 2412.06464) in plain torch, sequence by sequence.

Megatron takes them from flash-linear-attention, which needs a GPU.
"""

from __future__ import annotations

import torch
from megatron.core.ssm.gated_delta_net import common, gdn

_NORM_EPSILON = 1e-6


def use_plain_kernels() -> None:
    """Make Megatron's gated delta nets use the functions of this file."""
    common.HAVE_FLA = True
    common.l2norm = _l2norm
    gdn.causal_conv1d = _causal_conv1d
    gdn.chunk_gated_delta_rule = _gated_delta_rule


def _l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPSILON)


def _causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cu_seqlens: torch.Tensor | None, **unused: object
) -> tuple[torch.Tensor, None]:
    """Convolve each channel with itself, then apply SiLU; x is [1, tokens, channels], weight [channels, width]."""
    channels, width = weight.shape
    outputs = []
    for sequence in _sequences(x, cu_seqlens):
        padded = torch.nn.functional.pad(sequence.transpose(1, 2), (width - 1, 0))
        outputs.append(torch.nn.functional.conv1d(padded, weight.unsqueeze(1), bias, groups=channels).transpose(1, 2))
    return torch.nn.functional.silu(torch.cat(outputs, dim=1)), None


def _gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Run Megatron's own rule on each sequence alone; all are [1, tokens, heads, ...]."""
    parts = zip(*(_sequences(tensor, cu_seqlens) for tensor in (q, k, v, g, beta)), strict=True)
    outputs = [common.torch_chunk_gated_delta_rule(*part[:3], g=part[3], beta=part[4], **options)[0] for part in parts]
    return torch.cat(outputs, dim=1), None


def _sequences(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> list[torch.Tensor]:
    if cu_seqlens is None:
        return [x]
    lengths = cu_seqlens.diff().tolist()
    return [part for part in x.split(lengths, dim=1) if part.shape[1]]
