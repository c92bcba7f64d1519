"""One packed micro-batch: rows laid end to end, without padding between short and long ones, as megatron takes them.

`step` splits a batch into these and runs the model on each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from dagrl.data.batch import Batch
from dagrl.data.packing import pack
from dagrl.spec.schema import ParallelSpec


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a batch, packed. N tokens with padding, T response tokens, S rows."""

    rows: np.ndarray
    """Positions in the batch, int64 [S]; none in the micro-batch of a rank that has no rows."""
    input_ids: torch.Tensor
    """Prompt, response and padding of each row, int64 [1, N]."""
    position_ids: torch.Tensor
    """Place of each token in its row, int64 [1, N]."""
    sequences: PackedSeqParams
    """Where rows begin and end."""
    predicting: torch.Tensor
    """Places of the tokens whose logits predict the response tokens, in row order, int64 [T]."""
    targets: torch.Tensor
    """The response tokens, in row order, int64 [T]."""
    row: torch.Tensor
    """Row that each response token belongs to, int64 [T], in 0..S-1."""


def row_alignment(parallel: ParallelSpec) -> int:
    """What the length of every packed row is a multiple of: ranks share out a pack's tokens evenly."""
    context = parallel.context_parallel_size
    chunks = 2 * context if context > 1 else 1
    return chunks * (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1)


def split_batch(batch: Batch, *, tokens: int, alignment: int, device: torch.device) -> list[MicroBatch]:
    """Micro-batches of at most `tokens` tokens, padding counted. ValueError where a row alone is longer.

    A batch without rows gives one micro-batch that predicts nothing: its rank runs the model all the same, and takes
    part in what the ranks do together.
    """
    lengths = batch["prompt_tokens"].lengths + batch["response_tokens"].lengths
    if len(batch) == 0:
        return [_micro_batch([np.zeros(alignment, np.int64)], np.array([alignment]), np.arange(0), alignment, device)]
    micro_batches = []
    for rows in pack(_align(lengths, alignment), tokens):
        token_ids = [np.concatenate([batch["prompt_tokens"][row], batch["response_tokens"][row]]) for row in rows]
        micro_batches.append(_micro_batch(token_ids, batch["prompt_tokens"].lengths[rows], rows, alignment, device))
    return micro_batches


def _micro_batch(
    token_ids: list[np.ndarray], prompt_lengths: np.ndarray, rows: np.ndarray, alignment: int, device: torch.device
) -> MicroBatch:
    assert prompt_lengths.min() > 0, "the first response token needs a prompt to be predicted from"
    lengths = np.array([len(ids) for ids in token_ids])
    padded = _align(lengths, alignment)
    ends = np.cumsum(padded)
    starts = ends - padded
    input_ids = np.zeros(ends[-1], dtype=np.int64)
    for start, ids in zip(starts, token_ids, strict=True):
        input_ids[start : start + len(ids)] = ids
    # A token is predicted by the one before it.
    responses = lengths - prompt_lengths
    first = starts + prompt_lengths - 1
    predicting = np.repeat(first, responses) + _counting(responses)
    # Padding belongs to its row: attention is causal, so the row's own tokens never see it.
    bounds = torch.tensor([0, *ends], dtype=torch.int32, device=device)
    return MicroBatch(
        rows=rows,
        input_ids=torch.from_numpy(input_ids).to(device)[None],
        position_ids=torch.from_numpy(_counting(padded)).to(device)[None],
        sequences=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            max_seqlen_q=int(padded.max()),
            max_seqlen_kv=int(padded.max()),
        ),
        predicting=torch.from_numpy(predicting).to(device),
        targets=torch.from_numpy(input_ids[predicting + 1]).to(device),
        row=torch.from_numpy(np.repeat(np.arange(len(responses)), responses)).to(device),
    )


def _align(lengths: np.ndarray, alignment: int) -> np.ndarray:
    return -(-lengths // alignment) * alignment


def _counting(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ... for each length, one after the other: [2, 3] gives [0, 1, 0, 1, 2]."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
