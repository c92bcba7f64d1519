"""A model's initial weights, read from its folder or drawn at random.

All engines use this module, so that engines of one pipeline have identical weights, in any backend and parallel layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

from dagrl.backends.families.registry import buildable, find_family
from dagrl.backends.families.tensors import published_tensors as published_tensors_of
from dagrl.config.schema import ModelSpec
from dagrl.model_files.library_model import library_shapes, load_hf_config
from dagrl.model_files.stored_weights import SafetensorsFolder
from dagrl.model_files.tensor_names import SCORE

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class WeightSource(Protocol):
    """The full initial weights of a model by their names in published checkpoints."""

    def names(self) -> list[str]:
        """All tensors; a tied output layer is not listed."""

    def get(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in its stored dtype. Raises ValueError for an unknown name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, without reading it. Raises ValueError for an unknown name."""


def weight_source(model: ModelSpec, seed: int) -> WeightSource:
    """The initial weights of `model`; `seed` is for random ones. Raises ValueError for quantised weights."""
    config = load_hf_config(model)
    if model.path is None:
        return RandomWeights(config, seed)
    if getattr(config, "quantization_config", None):
        raise ValueError(
            f"{model.path / 'config.json'} says that the weights are quantised (quantization_config), and cannot be "
            "trained; save the model dequantised, in bfloat16 and without quantization_config"
        )
    return SafetensorsFolder(model.path.expanduser(), tied_output=config.tie_word_embeddings)


class RandomWeights:
    """Randomly initialised weights. Each tensor has its own random stream, seeded by its name.

    So a tensor does not depend on the rank or the order of requests. Matrices are normal with the config's
    ``initializer_range`` as standard deviation, norms multiply with 1 and biases are 0, as in Hugging Face's
    initialisation.
    """

    def __init__(self, config: PretrainedConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._family = find_family(config.model_type)

    def names(self) -> list[str]:
        return list(self._shapes)

    def get(self, name: str) -> torch.Tensor:
        """Draw one tensor, float32."""
        shape = self.shape(name)
        if len(shape) == 1:
            zero = name.endswith("bias") or (self._family is not None and self._family.is_zero_centred(name))
            return torch.zeros(shape) if zero else torch.ones(shape)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
        deviation = self._config.get_text_config().initializer_range
        return torch.empty(shape).normal_(0.0, deviation, generator=generator)

    def shape(self, name: str) -> tuple[int, ...]:
        if name == SCORE:
            return 1, self._config.get_text_config().hidden_size
        if name not in self._shapes:
            raise ValueError(f"a {self._config.model_type} model has no tensor {name!r}")
        return self._shapes[name]

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return published_shapes(self._config)


def published_shapes(config: PretrainedConfig) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a causal language model's tensors by the names of published checkpoints; tied ones once."""
    fields = config.to_dict()
    try:
        family, known = buildable(fields)
    except ValueError:
        return library_shapes(config)
    if not family.has_tables:
        return library_shapes(config)
    # Without the library's model class, whose import takes seconds.
    return dict(published_tensors_of(family.shape(known)))
