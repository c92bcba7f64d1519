"""Weights in blockwise fp8, as DeepSeek-V3 and Qwen3-FP8 are published: which tensors, and what config.json says.

The sender of weights and the folder that a server starts from both ask `BlockFp8`, so that they agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

BLOCK = 128
"""Rows and columns of a block, which has one scale."""
SCALE_SUFFIX = "_scale_inv"
"""End of the name of a weight's scales, after the name of the weight."""

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
class BlockFp8:
    """The choice of tensors that are quantised."""

    modules_to_not_convert: tuple[str, ...] = ()
    """Modules that keep the trainer's format: whole names, or any part of a name between dots."""

    def choose(self, tensors: NamedShapes) -> frozenset[str]:
        """Return the names of the weights that are quantised, of all `tensors` of a model.

        Modules that engines fuse are quantised together or not at all.
        """
        candidates = {name: _fused(_module(name)) for name, shape in tensors if _is_projection(name, shape)}
        kept = {fused for name, fused in candidates.items() if self._keeps(_module(name))}
        return frozenset(name for name, fused in candidates.items() if fused not in kept)

    def quantization_config(self, tensors: NamedShapes) -> dict[str, Any]:
        """Return the entry ``quantization_config`` of a config.json, which names each module that is not quantised."""
        tensors = list(tensors)
        chosen = self.choose(tensors)
        others = [
            _module(name)
            for name, shape in tensors
            if name not in chosen and name.endswith(".weight") and len(shape) == _MATRIX
        ]
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": others,
        }

    def _keeps(self, module: str) -> bool:
        return any(f".{kept}." in f".{module}." for kept in self.modules_to_not_convert)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight."""
    return tuple(-(-size // BLOCK) for size in shape)


def _is_projection(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == _MATRIX and _PROJECTION.fullmatch(name) is not None


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _fused(module: str) -> str:
    """Return the name of the module that an engine fuses this one into."""
    for pattern, fused in _FUSED:
        module = pattern.sub(fused, module)
    return module
