"""Vision-language models: the vision tower before a language model, and the positions of tokens and patches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dagrl.backends.families.config_fields import ConfigFields, HfConfig, is_size
from dagrl.backends.families.tensor_maps import MappedTensor, Replicated, Shape
from dagrl.model_files.library_classes import config_class

TOWER = "visual."
"""Prefix of the tower's tensors in Megatron: the tower is Hugging Face's module."""


_SIZES = {
    "width": "hidden_size",
    "depth": "depth",
    "mlp_width": "intermediate_size",
    "patch": "patch_size",
    "merge": "spatial_merge_size",
    "frames": "temporal_patch_size",
    "output": "out_hidden_size",
}


@dataclass(frozen=True, slots=True)
class VisionTower:
    """Sizes of a tower of Qwen2.5-VL's kind (https://arxiv.org/abs/2502.13923), and of the merger behind it."""

    width: int
    depth: int
    mlp_width: int
    patch: int
    """Height and width of a patch in pixels."""
    merge: int
    """Height and width in patches of the square that becomes one token."""
    frames: int
    output: int
    """Width of the language model."""
    channels: int = 3
    prefix: str = TOWER
    """Prefix of the tower's tensors in published checkpoints."""
    extra_layers: tuple[int, ...] = ()
    """Layers of the tower whose outputs are added after the first layers of the language model, one after each
    (DeepStack, https://arxiv.org/abs/2406.04334)."""

    @property
    def parameters(self) -> int:
        return sum(tensor.numel for tensor in self.tensors())

    def tensors(self) -> Iterator[MappedTensor]:
        """Yield all tensors of tower and merger; each rank of the first stage holds them whole."""
        width, merged = self.width, self.width * self.merge**2
        yield self._whole("patch_embed.proj.weight", (width, self.channels, self.frames, self.patch, self.patch))
        for block in range(self.depth):
            yield self._whole(f"blocks.{block}.norm1.weight", (width,))
            yield self._whole(f"blocks.{block}.norm2.weight", (width,))
            yield from self._linear(f"blocks.{block}.attn.qkv", 3 * width, width)
            yield from self._linear(f"blocks.{block}.attn.proj", width, width)
            yield from self._linear(f"blocks.{block}.mlp.gate_proj", self.mlp_width, width)
            yield from self._linear(f"blocks.{block}.mlp.up_proj", self.mlp_width, width)
            yield from self._linear(f"blocks.{block}.mlp.down_proj", width, self.mlp_width)
        yield self._whole("merger.ln_q.weight", (width,))
        yield from self._linear("merger.mlp.0", merged, merged)
        yield from self._linear("merger.mlp.2", self.output, merged)

    def _linear(self, name: str, outputs: int, inputs: int) -> Iterator[MappedTensor]:
        yield self._whole(f"{name}.weight", (outputs, inputs))
        yield self._whole(f"{name}.bias", (outputs,))

    def _whole(self, name: str, shape: Shape) -> MappedTensor:
        return MappedTensor(f"{TOWER}{name}", (f"{self.prefix}{name}",), (shape,), Replicated())


def mrope_positions(length: int, starts: np.ndarray, grids: np.ndarray) -> np.ndarray:
    """Temporal, height and width position of each token of a row, int64 [3, length].

    Image i begins at token ``starts[i]`` and has ``grids[i]`` = (rows, columns) tokens. Its tokens have the positions
    of their rows and columns, counted from the next free position; text continues after the largest. That is Qwen2-VL's
    M-RoPE (https://arxiv.org/abs/2409.12191, section 2.1), for images.
    """
    positions = np.zeros((3, length), dtype=np.int64)
    token = following = 0
    for start, (rows, columns) in zip(starts.tolist(), grids.tolist(), strict=True):
        text = start - token
        positions[:, token:start] = following + np.arange(text)
        following += text
        end = start + rows * columns
        positions[0, start:end] = following
        positions[1, start:end] = following + np.repeat(np.arange(rows), columns)
        positions[2, start:end] = following + np.tile(np.arange(columns), rows)
        following += max(rows, columns)
        token = end
    positions[:, token:] = following + np.arange(length - token)
    return positions


def mrope_faults(config: HfConfig, sections: object, rotated_part: float = 1.0) -> Iterator[str]:
    """Yield a fault of `sections` that lack frequencies for time, height or width of a position."""
    if not (isinstance(sections, list) and len(sections) == 3 and all(map(is_size, sections))):
        message = "rope_parameters has no mrope_section, three numbers of frequencies for time, height and width"
        yield f"{message}; copy config.json from where the model is published"
        return
    heads, hidden, head_dim = (config.get(name) for name in ("num_attention_heads", "hidden_size", "head_dim"))
    if not is_size(head_dim) and is_size(heads) and is_size(hidden):
        head_dim = hidden // heads
    if is_size(head_dim) and 2 * sum(sections) != int(head_dim * rotated_part):
        part = "a head" if rotated_part == 1 else "the rotated part of a head"
        half = int(head_dim * rotated_part) // 2
        yield f"mrope_section adds up to {sum(sections)}, and half {part} has {half}; make them equal"


def rope_fields(config: HfConfig) -> HfConfig:
    """The fields of the rotary embedding, by either name of their section."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def tower_fields(model_type: str, config: ConfigFields) -> ConfigFields:
    """The fields of a model's ``vision_config``, with the defaults of transformers."""
    return ConfigFields({**config_class(model_type, part="vision").defaults, **(config.get("vision_config") or {})})


def tower_sizes(fields: ConfigFields) -> dict[str, Any]:
    return {name: fields.size(field) for name, field in _SIZES.items()}
