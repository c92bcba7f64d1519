"""Weights in fp8: which tensors, the shapes of their scales, and what config.json says.

The sender of weights and the folder that a server starts from both ask `Fp8Weights`, so that they agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

BLOCK = 128
"""Rows and columns of a block."""
SCALE_SUFFIXES = {"block": "_scale_inv", "channel": "_scale"}
"""End of the name of a weight's scales, after the name of the weight."""

type Granularity = Literal["block", "channel"]
"""Part of a weight that shares a scale: a block (DeepSeek-V3, Qwen3-FP8), or an output channel, which is a row of the
matrix (llm-compressor's ``FP8_DYNAMIC``)."""

_PROJECTION = re.compile(r"(?:.*\.)?layers\.\d+\..*(?:_proj|\.experts\.\d+\.w[123])\.weight")
"""Linear layers of attention, MLPs and experts: no norms, routers, embedding or output layer."""
_FUSED = (
    (re.compile(r"\.[qkv]_proj$"), ".qkv_proj"),
    (re.compile(r"\.(?:gate|up)_proj$"), ".gate_up_proj"),
    (re.compile(r"\.experts\.\d+\..+$"), ".experts"),
)
"""Modules that inference engines fuse, and so hold in one format."""
_MATRIX = 2

type NamedShapes = Iterable[tuple[str, tuple[int, ...]]]
"""Name and shape of each tensor of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    """A format, and the choice of tensors that are quantised."""

    granularity: Granularity
    modules_to_not_convert: tuple[str, ...] = ()
    """Modules that keep the trainer's format: whole names, or any part of a name between dots."""

    def choose(self, tensors: NamedShapes) -> frozenset[str]:
        """Return the names of the quantised tensors among a model's `tensors`.

        Modules that engines fuse are quantised together or not at all.
        """
        candidates = {name: _fused(_module(name)) for name, shape in tensors if _is_projection(name, shape)}
        kept = {fused for name, fused in candidates.items() if self._keeps(_module(name))}
        return frozenset(name for name, fused in candidates.items() if fused not in kept)

    @property
    def scale_suffix(self) -> str:
        """End of the name of a weight's scales, after the name of the weight."""
        return SCALE_SUFFIXES[self.granularity]

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight."""
        return tuple(-(-size // each) for size, each in zip(shape, scaled_part(self.granularity, shape), strict=True))

    def quantization_config(self, tensors: NamedShapes) -> dict[str, Any]:
        """Return the entry ``quantization_config`` of a config.json, which names each module that is not quantised."""
        tensors = list(tensors)
        chosen = self.choose(tensors)
        others = [
            _module(name)
            for name, shape in tensors
            if name not in chosen and name.endswith(".weight") and len(shape) == _MATRIX
        ]
        if self.granularity == "channel":
            return _compressed_tensors(others)
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": others,
        }

    def _keeps(self, module: str) -> bool:
        return any(f".{kept}." in f".{module}." for kept in self.modules_to_not_convert)


def scaled_part(granularity: Granularity, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many rows and columns of a matrix of this shape have one scale."""
    return (BLOCK, BLOCK) if granularity == "block" else (1, shape[-1])


def _compressed_tensors(others: list[str]) -> dict[str, Any]:
    """Return the config of weights with a scale for each channel. Modules in `others` are not quantised."""
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    # Some servers do not know which modules they have fused. An output layer tied to the embedding has no tensor.
    ignored = dict.fromkeys(name for module in (*others, "lm_head") for name in (module, _fused(module)))
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**numbers, "strategy": "channel", "dynamic": False},
                "input_activations": {**numbers, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": list(ignored),
    }


def _is_projection(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == _MATRIX and _PROJECTION.fullmatch(name) is not None


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _fused(module: str) -> str:
    """Return the name of the module that an engine fuses this one into."""
    for pattern, fused in _FUSED:
        module = pattern.sub(fused, module)
    return module
