"""Weights between Hugging Face and Megatron folders, in one process, on the CPU, tensor by tensor.

`families` says which Megatron parameter holds which Hugging Face tensors; on disk a parameter is whole, as on a single
rank. Works with `stored_tensors` and `stored_writer`, which know the format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dagrl.backends.megatron.engine.families import MappedTensor, tensors, transformer_fields
from dagrl.backends.megatron.engine.stored_tensors import StoredTensors, is_layer, resolve
from dagrl.backends.megatron.engine.stored_writer import TensorToWrite, write_tensors
from dagrl.backends.megatron.engine.tensor_maps import join
from dagrl.backends.model_source import WeightSource, published_shapes
from dagrl.backends.weight_names import check_names
from dagrl.models.megatron_folder import LATEST
from dagrl.models.tensor_shapes import SCORE

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Shape = tuple[int, ...]

_RELEASE = "release"
"""Megatron-LM's name for weights without a training state."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter lies on disk: within `key`, at `index` along the first axes."""

    key: str
    index: tuple[int, ...]


def place_of(mapped: MappedTensor, *, stacked: bool) -> Place:
    """Where Megatron puts a parameter.

    Layers that are all alike are `stacked`: one key for all, the layer being its first axis. A layer's experts share
    a key in any case.
    """
    key, index = mapped.megatron, tuple[int, ...]()
    if stacked and mapped.layer is not None:
        key, index = key.replace(f".layers.{mapped.layer}.", ".layers.", 1), (mapped.layer,)
    if mapped.expert is not None:
        key = key.removesuffix(str(mapped.expert)).replace(".mlp.experts.", ".mlp.experts.experts.", 1)
        index = (*index, mapped.expert)
    return Place(key, index)


class StoredModel:
    """A model in a Megatron folder, by the names of published checkpoints."""

    def __init__(self, folder: Path, hf_config: PretrainedConfig, head: str = "lm") -> None:
        """Look at the folder. ValueError where it is no checkpoint, or not that of a model of `hf_config`."""
        self._stored = StoredTensors(resolve(folder))
        rows = self._stored.vocabulary_rows(hf_config.vocab_size)
        # The folder may be of a Megatron that fills vocabularies up to other sizes.
        mapped = list(tensors(hf_config, rows, head))
        stacked = not any(map(is_layer, self._stored.tensors))
        self._pairs = [(tensor, place_of(tensor, stacked=stacked)) for tensor in mapped]
        self._full_shapes = _full_shapes(hf_config)
        self._check(self._full_shapes)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the Hugging Face model, in its stored dtype; one parameter is in memory at a time.

        An output layer tied to the embedding is not among them. ValueError where a file cannot be read.
        """
        for mapped, place in self._pairs:
            parameter = self._stored.read(place.key, place.index)
            shapes = [self._full_shapes[name] for name in mapped.hf]
            yield from zip(mapped.hf, join(mapped.map, [parameter], shapes), strict=True)

    def _check(self, full_shapes: Mapping[str, Shape]) -> None:
        found = self._stored.weights()
        last: dict[str, tuple[int, ...]] = {}
        for mapped, place in self._pairs:
            if place.key not in found:
                raise self._misfit(f"it has no tensor {place.key!r}")
            shape, wanted = found[place.key].shape[len(place.index) :], _shape(mapped, full_shapes)
            if shape != wanted:
                raise self._misfit(f"tensor {place.key!r} is {list(shape)} there, and {list(wanted)} by the config")
            last[place.key] = max(place.index, last.get(place.key, place.index))
        for key, index in last.items():
            held, wanted = found[key].shape[: len(index)], tuple(number + 1 for number in index)
            if held != wanted:
                what = f"{key!r} is there for {list(held)} layers or experts, and {list(wanted)} by the config"
                raise self._misfit(what)
        left_over = sorted(found.keys() - last.keys())
        if left_over:
            what = f"it holds {len(left_over)} tensors that the model does not have, {left_over[0]!r} among them"
            raise self._misfit(what)

    def _misfit(self, reason: str) -> ValueError:
        return ValueError(
            f"{self._stored.folder} is no model of this config: {reason}; name the config that it was made with"
        )


def write_megatron(source: WeightSource, hf_config: PretrainedConfig, padded_rows: int, folder: Path) -> None:
    """Write Hugging Face weights to `folder`, which exists, as Megatron-LM keeps released models; dtypes stay.

    The embedding gets `padded_rows` rows, so many that the ranks of the layouts in mind share them evenly. Raises
    ValueError where the weights are not those of `hf_config` and OSError where the folder cannot be written.
    """
    pairs = list(tensors(hf_config, padded_rows))
    _check_source(pairs, hf_config, source)
    # Megatron's own rule: a list of dense and mixture layers means that they are not alike.
    stacked = not isinstance(transformer_fields(hf_config).get("moe_layer_freq"), list)
    by_key: dict[str, dict[tuple[int, ...], MappedTensor]] = {}
    for mapped in pairs:
        place = place_of(mapped, stacked=stacked)
        by_key.setdefault(place.key, {})[place.index] = mapped
    full_shapes = _full_shapes(hf_config)
    content = {}
    for key, parts in by_key.items():
        axes = tuple(number + 1 for number in max(parts))
        some = next(iter(parts.values()))
        makers = {index: partial(_parameter, mapped, source) for index, mapped in parts.items()}
        content[key] = TensorToWrite((*axes, *_shape(some, full_shapes)), source.get(some.hf[0]).dtype, makers)
    release = folder / _RELEASE
    release.mkdir()
    write_tensors(release, content, {"iteration": 0, "checkpoint_version": 3.0})
    (folder / LATEST).write_text(_RELEASE)


def _full_shapes(hf_config: PretrainedConfig) -> Mapping[str, Shape]:
    return {**published_shapes(hf_config), SCORE: (1, hf_config.hidden_size)}


def _shape(mapped: MappedTensor, full_shapes: Mapping[str, Shape]) -> Shape:
    """Shape of the parameter where a single rank holds it."""
    return mapped.map.shard_shape([full_shapes[name] for name in mapped.hf], 1)


def _parameter(mapped: MappedTensor, source: WeightSource) -> torch.Tensor:
    return mapped.map.shard([source.get(name) for name in mapped.hf], 0, 1)


def _check_source(pairs: Sequence[MappedTensor], hf_config: PretrainedConfig, source: WeightSource) -> None:
    """Refuse weights that are not all of the model's, before anything is written."""
    full_shapes = published_shapes(hf_config)
    wanted = {name for mapped in pairs for name in mapped.hf}
    check_names(source.names(), wanted, hf_config)
    for name in sorted(wanted):
        if source.shape(name) != full_shapes[name]:
            raise ValueError(
                f"tensor {name!r} is {list(source.shape(name))}, but its config says {list(full_shapes[name])}"
            )
