"""Weights between Hugging Face and Megatron folders, in one process, on the CPU, tensor by tensor.

`dagrl.backends.families` says which Megatron parameter holds which Hugging Face tensors; on disk a parameter is whole,
as on a single rank. Works with `stored_tensors` and `stored_writer`, which know the format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dagrl.backends.families.registry import buildable
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.families.tensor_maps import MappedTensor, Sections, join
from dagrl.backends.families.tensors import model_tensors
from dagrl.backends.megatron.adapter_folder import CONFIG, PREFIX, WEIGHTS
from dagrl.backends.megatron.lora import LoraSpec, adapters
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.backends.megatron.stored.stored_tensors import StoredTensors
from dagrl.backends.megatron.stored.stored_writer import TensorToWrite, write_tensors
from dagrl.backends.megatron.stored_folder import LATEST, newest_checkpoint
from dagrl.backends.runtime.initial_weights import WeightSource, weight_source
from dagrl.config.errors import counted
from dagrl.config.schema import ModelSpec
from dagrl.model_files.library_classes import auto_classes
from dagrl.model_files.tensor_names import SCORE, check_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_RELEASE = "release"
"""Megatron-LM's name for weights without a training state."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a parameter's rows: within `key`, at `index` along the first axes."""

    key: str
    index: tuple[int, ...]
    shape: tuple[int, ...]


def _places_of(mapped: MappedTensor, *, stacked: bool) -> list[_Place]:
    """The places of a parameter in Megatron's format, in order.

    Equal layers are `stacked` under one key, whose first axis is the layer. A layer's experts share a key in any case.
    Sections have separate keys.
    """
    key, index = mapped.megatron, tuple[int, ...]()
    if stacked and mapped.layer is not None:
        key, index = key.replace(f".layers.{mapped.layer}.", ".layers.", 1), (mapped.layer,)
    if mapped.expert is not None:
        key = key.removesuffix(str(mapped.expert)).replace(".mlp.experts.", ".mlp.experts.experts.", 1)
        index = (*index, mapped.expert)
    shape = mapped.map.shard_shape(mapped.shapes, 1)
    if not isinstance(mapped.map, Sections):
        return [_Place(key, index, shape)]
    return [_Place(f"{key}.{name}", index, (rows, *shape[1:])) for name, rows in mapped.map.sections.items()]


class _Stored:
    """Tensors of a Megatron folder."""

    def __init__(self, stored: StoredTensors, mapped: Iterable[MappedTensor]) -> None:
        """`mapped` are all weights of the model. ValueError if the folder does not hold exactly these."""
        self._stored = stored
        stacked = not stored.layer_by_layer
        self.pairs = [(tensor, _places_of(tensor, stacked=stacked)) for tensor in mapped]
        self._places = {tensor.megatron: places for tensor, places in self.pairs}
        self._check()

    def full(self, mapped: MappedTensor) -> list[torch.Tensor]:
        """The Hugging Face tensors of a parameter, in the stored dtype. ValueError if a file cannot be read."""
        parts = [self._stored.read(place.key, place.index) for place in self._places[mapped.megatron]]
        return join(mapped.map, [torch.cat(parts) if len(parts) > 1 else parts[0]], mapped.shapes)

    def _check(self) -> None:
        weights = self._stored.weights()
        last: dict[str, tuple[int, ...]] = {}
        for place in (place for _, places in self.pairs for place in places):
            if place.key not in weights:
                raise self._misfit(f"it has no tensor {place.key!r}")
            shape = weights[place.key].shape[len(place.index) :]
            if shape != place.shape:
                sizes = f"{list(shape)} there, and {list(place.shape)} by the config"
                raise self._misfit(f"tensor {place.key!r} is {sizes}")
            last[place.key] = max(place.index, last.get(place.key, place.index))
        for key, index in last.items():
            held, wanted = weights[key].shape[: len(index)], tuple(number + 1 for number in index)
            if held != wanted:
                what = f"{key!r} is there for {list(held)} layers or experts, and {list(wanted)} by the config"
                raise self._misfit(what)
        left_over = sorted(weights.keys() - last.keys())
        if left_over:
            what = f"it holds {counted(len(left_over), 'tensor')} that the model does not have, "
            what += f"{left_over[0]!r} among them"
            raise self._misfit(what)

    def _misfit(self, reason: str) -> ValueError:
        return ValueError(
            f"{self._stored.folder} is no model of this config: {reason}; name the config that it was made with"
        )


class StoredModel(_Stored):
    """A model in a Megatron folder, by the names of published checkpoints."""

    def __init__(self, folder: Path, hf_config: PretrainedConfig, head: str = "lm") -> None:
        """Read the folder's metadata. ValueError if it is not a checkpoint of a model of `hf_config`."""
        stored = StoredTensors(newest_checkpoint(folder))
        # The folder may come from a Megatron that pads vocabularies to other sizes.
        rows = stored.vocabulary_rows(hf_config.get_text_config().vocab_size)
        super().__init__(stored, model_tensors(_shape_of(hf_config), rows, head))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the Hugging Face model except a tied output layer, in stored dtypes, one after the other."""
        for mapped, _ in self.pairs:
            yield from zip(mapped.hf, self.full(mapped), strict=True)


class StoredAdapters(_Stored):
    """The low-rank adapters in a Megatron folder, and a head that was trained with them."""

    def __init__(self, folder: Path, hf_config: PretrainedConfig, lora: LoraSpec, head: str = "lm") -> None:
        """Read the folder's metadata. ValueError if it does not hold the adapters `lora` of a model of `hf_config`."""
        base = list(model_tensors(_shape_of(hf_config), hf_config.get_text_config().vocab_size, head))
        self._lora = lora
        self._adapters = {adapter.base.megatron: adapter for adapter in adapters(base, lora)}
        self._base = base
        head_tensors = [tensor for tensor in base if tensor.hf == (SCORE,)]
        self._head = {tensor.megatron for tensor in head_tensors}
        mapped = [part for adapter in self._adapters.values() for part in (adapter.a, adapter.b)]
        super().__init__(StoredTensors(newest_checkpoint(folder)), [*mapped, *head_tensors])

    def merged(self, source: dict[str, Callable[[], torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the Hugging Face model, adapters added, in their dtype; `source` gives the base model's."""
        for base in self._base:
            if base.megatron in self._head:
                yield base.hf[0], self.full(base)[0]
            elif (adapter := self._adapters.get(base.megatron)) is None:
                yield from ((name, source[name]()) for name in base.hf)
            else:
                for name, a, b in zip(base.hf, self.full(adapter.a), self.full(adapter.b), strict=True):
                    yield name, torch.addmm(source[name]().to(b.dtype), b, a, alpha=self._lora.scale)

    def peft(self) -> Iterator[tuple[str, torch.Tensor]]:
        for adapter in self._adapters.values():
            for part in (adapter.a, adapter.b):
                yield from zip((f"{PREFIX}{name}" for name in part.hf), self.full(part), strict=True)


def write_megatron(source: WeightSource, hf_config: PretrainedConfig, padded_rows: int, folder: Path) -> None:
    """Write Hugging Face weights to `folder`, which exists, in Megatron-LM's format of released models; dtypes are
    kept.

    The embedding is padded to `padded_rows` rows. ValueError if the weights do not match `hf_config`.
    """
    shape = _shape_of(hf_config)
    if shape.linear_layers:
        raise ValueError(_unwritten(hf_config))
    pairs = list(model_tensors(shape, padded_rows))
    _check_source(pairs, hf_config, source)
    # Megatron's own rule: a list of dense and mixture layers means that layers differ.
    stacked = shape.experts is None or all(shape.mixture_layers)
    by_key: dict[str, dict[tuple[int, ...], tuple[MappedTensor, _Place]]] = {}
    for mapped in pairs:
        (place,) = _places_of(mapped, stacked=stacked)
        by_key.setdefault(place.key, {})[place.index] = mapped, place
    content = {}
    for key, parts in by_key.items():
        axes = tuple(number + 1 for number in max(parts))
        some, somewhere = next(iter(parts.values()))
        makers = {index: partial(_parameter, mapped, source) for index, (mapped, _) in parts.items()}
        content[key] = TensorToWrite((*axes, *somewhere.shape), source.get(some.hf[0]).dtype, makers)
    release = folder / _RELEASE
    release.mkdir()
    write_tensors(release, content, {"iteration": 0, "checkpoint_version": 3.0})
    (folder / LATEST).write_text(_RELEASE)


def _unwritten(hf_config: PretrainedConfig) -> str:
    fact = f"models of type {hf_config.model_type} are not written in Megatron's format"
    return f"{fact}; engines read the Hugging Face folder itself"


def _shape_of(hf_config: PretrainedConfig) -> ModelShape:
    family, fields = buildable(hf_config.to_dict())
    if not family.has_tables:
        raise ValueError(_unwritten(hf_config))
    return family.shape(fields)


def _parameter(mapped: MappedTensor, source: WeightSource) -> torch.Tensor:
    return mapped.map.shard([source.get(name) for name in mapped.hf], 0, 1)


def _check_source(pairs: Sequence[MappedTensor], hf_config: PretrainedConfig, source: WeightSource) -> None:
    wanted = {name: shape for mapped in pairs for name, shape in zip(mapped.hf, mapped.shapes, strict=True)}
    check_names(source.names(), wanted.keys(), hf_config)
    for name, shape in sorted(wanted.items()):
        if source.shape(name) != shape:
            raise ValueError(f"tensor {name!r} is {list(source.shape(name))}, but its config says {list(shape)}")


def write_hf(source: Path, model: ModelSpec, folder: Path, engine: MegatronEngineSpec | None, seed: int) -> None:
    """Write a Megatron checkpoint as a Hugging Face folder with the config and tokenizer of `model`.

    `engine` and `seed` are the run's; adapters are merged. ValueError if Hugging Face has no class for that head.
    """
    from dagrl.model_files.hf_folder import copy_tokenizer, write_hf_folder
    from dagrl.model_files.library_model import architecture, load_hf_config

    head, lora = (engine.head, engine.lora) if engine else ("lm", None)
    config = load_hf_config(model)
    family, _ = buildable(config.to_dict())
    if not family.has_tables:
        from dagrl.backends.megatron.engine.bridge import tensors_of_checkpoint

        tensors = tensors_of_checkpoint(source, config)
    elif lora is None or engine is None:
        tensors = StoredModel(source, config, head).tensors()
    else:
        tensors = StoredAdapters(source, config, lora, head).merged(base_of(engine, model, seed, config))
    if head == "lm":
        name_of_class = architecture(config)
    else:
        # Hugging Face has no class of critics: a value head, too, is a classifier's with one label.
        classes = auto_classes("MODEL_FOR_SEQUENCE_CLASSIFICATION")
        if config.model_type not in classes:
            raise ValueError(f"Hugging Face has no class for a {config.model_type} with a {head} head")
        name_of_class, config.num_labels = classes[config.model_type], 1
    write_hf_folder(folder, config, name_of_class, tensors, source=model.path)
    copy_tokenizer(model, folder)


def write_adapter(source: Path, model: ModelSpec, folder: Path, lora: LoraSpec) -> None:
    """Write the adapters of a checkpoint as PEFT does. Layers that Megatron fuses get the same `A`."""
    from safetensors.torch import save_file

    from dagrl.model_files.library_model import load_hf_config

    stored = StoredAdapters(source, load_hf_config(model), lora)
    tensors = dict(stored.peft())
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model.hub or model.path or ""),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def base_of(
    engine: MegatronEngineSpec, model: ModelSpec, seed: int, config: PretrainedConfig
) -> dict[str, Callable[[], torch.Tensor]]:
    """Functions that read the weights that the engine started from."""
    if engine.dist_checkpointing_path is None:
        weights = weight_source(model, seed)
        return {name: partial(weights.get, name) for name in weights.names()}
    stored = StoredModel(engine.dist_checkpointing_path, config)

    def read(mapped: MappedTensor, index: int) -> torch.Tensor:
        return stored.full(mapped)[index]

    return {name: partial(read, mapped, i) for mapped, _ in stored.pairs for i, name in enumerate(mapped.hf)}
