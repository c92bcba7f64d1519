"""Samples tokens from logits in one pass over the vocabulary, with their log-probs.

The Gumbel-max trick (Maddison et al., "A* Sampling", 2014): the largest of ``logit + noise``, with independent Gumbel
noise, is a sample of the softmax. The same pass sums the exponentials. Torch's functions need a dozen passes for
softmax, noise, maximum and logarithm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LANES = 1024
"""Columns of a quarter of a block: Philox makes four random numbers at a time."""
_LOW = tl.constexpr(-1e30)
"""Below all logits, but finite, so that differences are numbers."""
_UNIT = tl.constexpr(2.0**-31)


def sample(logits: torch.Tensor, temperatures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, int32 [rows], and their log-probs, float32 [rows], of the softmax of `logits` over `temperatures`.

    `logits` are [rows, vocabulary], `temperatures` [rows, 1] and positive. Random numbers follow torch's seed.
    """
    rows, vocabulary = logits.shape
    device = logits.device
    seed = torch.randint(2**62, (1,), device=device)
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    _sample[(rows,)](
        logits, temperatures, seed, tokens, logprobs, vocabulary, logits.stride(0), LANES=LANES, num_warps=8
    )
    return tokens, logprobs


@triton.jit
def _sample(
    logits: tl.tensor,
    temperatures: tl.tensor,
    seed: tl.tensor,
    tokens: tl.tensor,
    logprobs: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    LANES: tl.constexpr,  # noqa: N803
) -> None:
    """One row. Each lane keeps the maximum, the sum and the best of its columns; they are put together at the end."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(seed)
    scale = 1.0 / tl.load(temperatures + row).to(tl.float32)
    lanes = tl.arange(0, LANES)
    highest = tl.full((LANES,), _LOW, tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    best = tl.full((LANES,), _LOW, tl.float32)
    where = tl.zeros((LANES,), tl.int32)
    blocks = tl.cdiv(vocabulary, 4 * LANES)
    for block in range(blocks):
        first = block * 4 * LANES + lanes
        # Numbers are different for each row and column.
        bits = tl.randint4x(number, (row * blocks + block) * LANES + lanes)
        for quarter in tl.static_range(4):
            columns = first + quarter * LANES
            highest, total, best, where = _take(
                logits + row * stride, columns, bits[quarter], scale, vocabulary, highest, total, best, where
            )
    top = tl.max(highest, 0)
    whole = tl.sum(total * tl.exp(highest - top), 0)
    lane = tl.argmax(best, 0)
    token = tl.sum(tl.where(lanes == lane, where, 0), 0)
    value = tl.load(logits + row * stride + token).to(tl.float32) * scale
    tl.store(tokens + row, token)
    tl.store(logprobs + row, value - top - tl.log(whole))


@triton.jit
def _take(
    logits: tl.tensor,
    columns: tl.tensor,
    bits: tl.tensor,
    scale: tl.tensor,
    vocabulary: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    best: tl.tensor,
    where: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Add a column to each lane."""
    values = tl.load(logits + columns, mask=columns < vocabulary, other=_LOW).to(tl.float32) * scale
    # Not by a maximum, which would drop NaN: log-probs of such a row must be NaN, too.
    values = tl.where(values < _LOW, _LOW, values)
    higher = tl.maximum(highest, values)
    total = total * tl.exp(highest - higher) + tl.exp(values - higher)
    uniform = ((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * _UNIT
    # -log(1 - u) is exponential; near 0, where 1 - u has too few digits, by its series. Its -log is Gumbel noise.
    exponential = tl.where(uniform < 1e-3, uniform + 0.5 * uniform * uniform, -tl.log(1.0 - uniform))
    scores = values - tl.log(exponential)
    better = scores > best
    return higher, total, tl.where(better, scores, best), tl.where(better, columns, where)
