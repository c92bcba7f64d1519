"""Checks of a PEFT folder with the initial adapters of an engine, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from dagrl.backends.families.tensor_maps import MappedTensor
from dagrl.backends.megatron.lora import Adapter, LoraSpec, adapters, layer_name
from dagrl.model_files.hf_config import read_json
from dagrl.model_files.safetensors_header import FLOATING, HeaderEntry, read_bytes, read_header

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    **dict.fromkeys(("use_dora", "use_rslora", "use_qalora", "fan_in_fan_out", "lora_bias"), (None, False)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), (None, {})),
    **dict.fromkeys(("modules_to_save", "layer_replication", "target_parameters"), (None, [])),
    "trainable_token_indices": (None, [], {}),
}
"""Options of PEFT -> the only values that Megatron's adapters support."""


def adapter_faults(lora: LoraSpec, tensors: Sequence[MappedTensor] | None) -> Iterator[tuple[str, str]]:
    """Yield mismatches with the section: a key of ``lora``, and the fault with its remedy.

    `tensors` are the model's; None if unknown.
    """
    folder = lora.path
    assert folder is not None, "a section without a folder"
    try:
        config, header = _read(folder)
    except (OSError, ValueError) as error:
        yield "path", str(error)
        return
    for option, values in _PLAIN.items():
        if config.get(option) not in values:
            fault = f"{folder / CONFIG} says {option}: {config.get(option)!r}, which these adapters do not compute"
            yield "path", f"{fault}; merge such adapters into the model with PEFT, and start from that"
            return
    numbers = (("rank", "r", lora.rank), ("alpha", "lora_alpha", lora.alpha))
    others = [(key, option) for key, option, own in numbers if config.get(option) != own]
    for key, option in others:
        yield key, f"the adapters of {folder} have {option}: {config.get(option)}; write `{key}: {config.get(option)}`"
    if tensors is None or others:
        return
    added = list(adapters(tensors, lora))
    wanted = {name: shape for adapter in added for name, shape in _published(adapter)}
    if wanted.keys() != header.keys():
        yield _other_names(folder, tensors, lora, wanted, header)
        return
    for name, entry in header.items():
        if entry.shape != wanted[name] or entry.dtype not in FLOATING:
            fault = f"is {entry.dtype} {list(entry.shape)}, and the model needs {list(wanted[name])}"
            yield "path", f"{folder / WEIGHTS}: tensor {name!r} {fault}; take the adapters of this model"
            return
    yield from _different_sides(folder / WEIGHTS, added)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, HeaderEntry]]:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}; name a folder that PEFT or `dagrl export --adapter` has written")
    config = read_json(folder / CONFIG)
    try:
        return config, read_header(folder / WEIGHTS)
    except ValueError as error:
        raise ValueError(f"{folder / WEIGHTS} {error}; copy the file again") from error


def _published(adapter: Adapter) -> Iterator[tuple[str, tuple[int, ...]]]:
    for side in (adapter.a, adapter.b):
        yield from zip((f"{PREFIX}{name}" for name in side.hf), side.shapes, strict=True)


def _other_names(
    folder: Path,
    tensors: Sequence[MappedTensor],
    lora: LoraSpec,
    wanted: Mapping[str, object],
    header: Mapping[str, object],
) -> tuple[str, str]:
    layers: dict[str, set[str]] = {}
    for adapter in adapters(tensors, lora.model_copy(update={"target_modules": "all-linear"})):
        layers.setdefault(str(layer_name(adapter.base)), set()).update(name for name, _ in _published(adapter))
    theirs = [layer for layer, names in layers.items() if names <= header.keys()]
    if theirs and set().union(*(layers[layer] for layer in theirs)) == header.keys():
        modules = "all-linear" if len(theirs) == len(layers) else f"[{', '.join(theirs)}]"
        return "target_modules", f"the adapters of {folder} are of other layers; write `target_modules: {modules}`"
    if strange := sorted(header.keys() - set().union(*layers.values())):
        fault = f"has a tensor {strange[0]!r}, which no adapter of this model has"
        return "path", f"{folder / WEIGHTS} {fault}; take the adapters of this model"
    missing = next(name for name in [*wanted, *sorted(set().union(*layers.values()))] if name not in header)
    fault = f"has no tensor {missing!r}; Megatron adapts all layers of a kind, and query, key and value together, as"
    return "path", f"{folder / WEIGHTS} {fault} gate and up projection"


def _different_sides(path: Path, added: Sequence[Adapter]) -> Iterator[tuple[str, str]]:
    """The first adapter whose parts have different `A`, where Megatron's layer has one."""
    content = read_bytes(path)
    for adapter in added:
        for one, other in pairwise(f"{PREFIX}{name}" for name in adapter.a.hf):
            if content(one) != content(other):
                fault = f"{path}: {one!r} and {other!r} differ, and Megatron's fused layer has one `A` for both"
                yield "path", f"{fault}; merge the adapters into the model with PEFT, and start from that"
                return
