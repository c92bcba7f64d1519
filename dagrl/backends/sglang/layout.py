"""SGLang's sizes, limits and defaults, for validation, planning and workers."""

from __future__ import annotations

TAKEN_OUT_OF_TP = ("ep_size", "attn_cp_size", "moe_dp_size", "dcp_size")
"""Fields of ServerArgs that subdivide ``tp_size``; each divides it."""

PARALLEL_SIZES = ("tp_size", "pp_size", "dp_size", *TAKEN_OUT_OF_TP)
"""Fields of ServerArgs that distribute a server over its GPUs."""

CPU_CACHE_TOKENS = 16384
"""Default ``max_total_tokens`` of a server on a CPU slot."""

KEPT_BACK = 8
"""Tokens at the end of a context and of a cache that SGLang does not use: it rejects a request that begins within six
of the end, as a resumed response may, and ends requests that come within two."""

FUSED = "fused"
"""dagrl's `sampling_backend`. ServerArgs lacks it, and would replace it on a CPU."""

SLEEPER_FRACTION = 0.8
"""Default ``mem_fraction_static`` of a server that sleeps: SGLang would use the free memory at its start, but colocated
engines keep some of it even while they sleep."""

LARGEST_GRAPH = 512
"""Default number of running requests up to which decoding graphs are captured; beyond SGLang's own limit it runs at
half its speed."""

FP8_PAGE = 64
"""Default ``page_size`` of a cache in fp8: FlashAttention 3 reads single tokens of it no faster than of a cache in
bfloat16, and such pages in 0.8 of the time."""


def kept_of_cache(page_size: int) -> int:
    """Tokens of a cache that no sample can use: SGLang rounds a prompt up to whole pages, and keeps one free."""
    return max(KEPT_BACK, 2 * page_size)
