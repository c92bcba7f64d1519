"""Number formats, by their names in torch and in libraries' command lines."""

from __future__ import annotations

from typing import NamedTuple


class NumberFormat(NamedTuple):
    """A format by its name in torch, and its bytes."""

    torch_name: str
    nbytes: int


_FLOAT32, _FLOAT16, _BFLOAT16 = NumberFormat("float32", 4), NumberFormat("float16", 2), NumberFormat("bfloat16", 2)

NUMBER_FORMATS: dict[str, NumberFormat] = {
    "fp32": _FLOAT32,
    "float32": _FLOAT32,
    "fp16": _FLOAT16,
    "float16": _FLOAT16,
    "bf16": _BFLOAT16,
    "bfloat16": _BFLOAT16,
    # Optimizers hold moments in fp8 as bytes, and their scales beside them.
    "fp8": NumberFormat("uint8", 1),
    "uint8": NumberFormat("uint8", 1),
}
"""Keyed by the name in a pipeline file."""
