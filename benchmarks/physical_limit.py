"""The least seconds that the stages of a GRPO step take on one device, by what it multiplies and reads in a second.

Matrix products run at the rate of one large product. A step of decoding reads all matrices and the cache of each row,
or takes as long as its products if that is longer. Nothing else counts: no norms, no optimizer, no communication.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from pipelines import Load

from dagrl.backends.families.flops import ModelFlops, model_flops
from dagrl.backends.families.shape import ModelShape

_REPEATS = 20


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one device."""

    matmul: float
    """FLOP/s of a large product in bfloat16, in float32 on a CPU."""
    fp8_matmul: float
    """The same in fp8; as `matmul` where a device has no fp8."""
    reads: float
    """Bytes/s."""
    value_bytes: int
    """Bytes of a value that is not in fp8."""


@dataclass(frozen=True, slots=True)
class Formats:
    """Parts of a step that are in fp8."""

    rollout: bool = False
    """Linear layers of the server."""
    cache: bool = False
    """Its keys and values."""
    training: bool = False
    """Products of the trainer's linear layers."""


def measured_rates() -> Rates:
    """Measure this process's device, in about a second."""
    if not torch.cuda.is_available():
        matmul = _product_rate(1024, lambda left, right: left @ right, torch.float32)
        return Rates(matmul, matmul, _read_rate(2**27), 4)
    matmul = _product_rate(8192, lambda left, right: left @ right, torch.bfloat16)
    has_fp8 = torch.cuda.get_device_capability() >= (8, 9)
    fp8 = _product_rate(8192, _fp8_product, torch.float8_e4m3fn) if has_fp8 else matmul
    return Rates(matmul, fp8, _read_rate(2**33), 2)


def stage_limits(shape: ModelShape, load: Load, rates: Rates, formats: Formats | None = None) -> dict[str, float]:
    """Seconds of ``rollout``, ``old`` and ``update`` for the samples of a step, of which each has full length."""
    formats = formats or Formats()
    flops = model_flops(shape)
    rows = np.full(load.samples, load.row_tokens)
    predictions = load.sampled_tokens
    old = _products(flops, rows, predictions, rates, fp8=formats.training)
    prompts = np.full(load.prompts, load.prompt_tokens)
    prefill = _products(flops, prompts, load.prompts, rates, fp8=formats.rollout)
    # The output layer alone: of the input's embedding, a step reads single rows.
    head = shape.vocabulary * shape.hidden
    linear_bytes = shape.matrices * (1 if formats.rollout else rates.value_bytes)
    token_bytes = shape.layers * shape.cache_values_per_token * (1 if formats.cache else rates.value_bytes)
    matmul = rates.fp8_matmul if formats.rollout else rates.matmul
    decode = 0.0
    for length in range(load.prompt_tokens, load.row_tokens):
        read = linear_bytes + head * rates.value_bytes + load.samples * length * token_bytes
        others = flops.per_prediction + flops.per_pair * length
        multiply = load.samples * (flops.per_token / matmul + others / rates.matmul)
        decode += max(read / rates.reads, multiply)
    return {"rollout": prefill + decode, "old": old, "update": 3 * old}


def _products(flops: ModelFlops, rows: np.ndarray, predictions: int, rates: Rates, *, fp8: bool) -> float:
    linear = flops.per_token * int(rows.sum())
    others = flops.forward(rows, predictions) - linear
    return linear / (rates.fp8_matmul if fp8 else rates.matmul) + others / rates.matmul


def _product_rate(
    size: int, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: product(left, right))


def _fp8_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    one = torch.ones((), device=left.device)
    return torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _read_rate(nbytes: int) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.ones(nbytes // 4, device=device)
    return nbytes / _seconds(values.sum)


def _seconds(work: Callable[[], object]) -> float:
    """Seconds of the fastest of many calls."""
    fastest = float("inf")
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - begun)
    return fastest
