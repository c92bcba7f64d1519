"""Rows of several lengths, and a Megatron model run on all of them in one pack.

Import as ``from packs import run_packed``: pytest's `pythonpath` holds this folder.
"""

from typing import Any

import torch

LENGTHS = (11, 1, 40, 7, 22, 3)
"""An even number of tokens in all: sequence parallelism on two ranks divides them."""


def sequences(vocab_size: int) -> list[torch.Tensor]:
    """Rows of `LENGTHS` random tokens."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]


def run_packed(chunk: Any, rows: list[torch.Tensor]) -> torch.Tensor:
    """Logits [tokens, this rank's columns] of the rows, one behind the other in a single pack."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *(len(row) for row in rows)], device=rows[0].device).cumsum(0).int()
    longest = max(len(row) for row in rows)
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    tokens = torch.cat(rows)[None]
    return chunk(tokens, torch.zeros_like(tokens), None, packed_seq_params=params)[0]
