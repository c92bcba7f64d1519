"""Names of number formats, as Megatron's command line and torch have them, for fields of Megatron's that take one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How a number is held."""

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
    # Megatron holds fp8 moments as bytes, and their scales beside them.
    "fp8": NumberFormat("uint8", 1),
    "uint8": NumberFormat("uint8", 1),
}
"""By the name that a pipeline file may give."""
