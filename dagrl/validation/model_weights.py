"""A folder's weight files, held against its config.json: whole files, and all tensors in dtypes and shapes that load.

Reads headers only. Without a known family, whose tensors would be known, files and their index are checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dagrl.backends.backend import WeightReader
from dagrl.backends.families.base import Family
from dagrl.backends.families.config_fields import ConfigFields, is_size
from dagrl.backends.families.registry import find_family
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.families.tensors import (
    DERIVED,
    OUTPUT,
    QUANTISED,
    SCORE,
    is_prediction_layer,
    layer_of,
    published_tensors,
)
from dagrl.backends.registry import backend_of
from dagrl.config.schema import Pipeline
from dagrl.models.safetensors_header import FLOATING, HeaderEntry, read_header
from dagrl.validation.json_files import json_object

INDEX, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"

_MOST_MISSING = 1000
"""Missing tensors after which a config is not looked through to its end."""
_REMEDY = "give the config.json that belongs to the weights, or copy the folder again"
_DEQUANTISE = "save the model dequantised, in bfloat16 and without quantization_config"


class _Stored(NamedTuple):
    file: Path
    entry: HeaderEntry


_Tensors = Mapping[str, _Stored]


def readers_of(pipeline: Pipeline, engines: Iterable[str]) -> list[WeightReader]:
    """How those engines read the weights of their model's folder, each way once; engines that do not are left out."""
    specs = (pipeline.engines[name] for name in engines)
    readers = (backend_of(spec).weight_reader(spec) for spec in specs)
    return list(dict.fromkeys(reader for reader in readers if reader is not None and reader.checked))


def may_be_quantised(pipeline: Pipeline, engines: Sequence[str]) -> bool:
    """Whether those engines, and they alone, load a model by libraries that dequantise it, and it is never trained."""
    specs = [pipeline.engines[name] for name in engines]
    readers = [backend_of(spec).weight_reader(spec) for spec in specs]
    return bool(readers) and all(reader is not None and reader.quantised for reader in readers)


def quantisation_problem(path: Path, config: Mapping[str, Any]) -> str | None:
    """The message for a config.json of quantised weights."""
    for field in ("quantization_config", "compression_config"):
        if told := config.get(field):
            method = told.get("quant_method") if isinstance(told, dict) else None
            named = f", {method}" if isinstance(method, str) else ""
            return f"{path} says that the weights are quantised ({field}{named}), and cannot be trained; {_DEQUANTISE}"
    return None


def folder_problem(folder: Path) -> str | None:
    """The first thing that is wrong with the config and the weights of a language model's folder."""
    path = folder / "config.json"
    config = json_object(path)
    if config is None or not isinstance(config.get("model_type"), str):
        return f"{path} is not a JSON object that names a model_type; copy the file again"
    family = find_family(config["model_type"])
    if family and (left_out := family.sizes_left_out(config)):
        return f"{path} does not say {left_out[0]}, a size of the model; copy the file again, or add it there"
    return quantisation_problem(path, config) or weights_problem(folder, config, [WeightReader()])


def weights_problem(folder: Path, config: Mapping[str, Any] | None, readers: Sequence[WeightReader]) -> str | None:
    """The first thing that is wrong with the weights of a folder. OSError where a file cannot be read.

    `config` is None where it is not known, or wrong itself.
    """
    if not readers:
        return None
    index = folder / INDEX
    try:
        stored, beside = _sharded(folder, index) if index.is_file() else (_single(folder), {})
    except ValueError as error:
        return str(error)
    if config is None:
        return None
    scale = next((name for name in stored if name.endswith(QUANTISED)), None)
    quantised = scale is not None or quantisation_problem(folder, config) is not None
    family = find_family(config.get("model_type"))
    if family is None:
        weights = {} if quantised else {name: stored[name] for name in stored if name.endswith(".weight")}
        return _dtype_problem(weights, readers)
    for reader in readers:
        if not quantised:
            problem = _misfit(folder, family.fields(config), family, reader, stored, beside)
        elif scale is not None and not reader.quantised:
            problem = f"{_of(stored, scale)} belongs to quantised weights, which cannot be trained; {_DEQUANTISE}"
        else:
            problem = None  # config.json is reported by itself, or the reader dequantises.
        if problem:
            return problem
    return None


def _single(folder: Path) -> dict[str, _Stored]:
    path = folder / SINGLE_FILE
    if not path.is_file():
        old = " (only PyTorch's .bin files)" if any(folder.glob("*.bin")) else ""
        raise ValueError(f"{folder} has no safetensors weights{old}; save the model as safetensors")
    try:
        return {name: _Stored(path, entry) for name, entry in read_header(path).items()}
    except ValueError as error:
        raise ValueError(f"{path} {error}; copy the file again") from error


def _sharded(folder: Path, index: Path) -> tuple[dict[str, _Stored], dict[str, Path]]:
    """The tensors that the index names, and those of its files that it does not."""
    content = json_object(index)
    files = content.get("weight_map") if content else None
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{index} does not say which file holds which weight; copy the file again")
    shards = sorted(set(files.values()))
    if lost := [name for name in shards if not (folder / name).is_file()]:
        raise ValueError(f"{folder} lacks {len(lost)} of its weight files, {lost[0]} among them; copy them again")
    headers: dict[str, dict[str, HeaderEntry]] = {}
    faults: dict[str, str] = {}
    for name in shards:
        try:
            headers[name] = read_header(folder / name)
        except ValueError as error:
            faults[name] = str(error)
    if faults:
        name, fault = next(iter(faults.items()))
        others = f", and {len(faults) - 1} more files are no better" if len(faults) > 1 else ""
        raise ValueError(f"{folder / name} {fault}{others}; copy it again")
    absent = [name for name, file in files.items() if name not in headers[file]]
    if absent:
        what = f"{index} says that {files[absent[0]]} holds tensor {absent[0]!r}, and it does not"
        raise ValueError(f"{what}{_more(absent)}; copy the index and its files again")
    paths = {name: folder / name for name in shards}
    stored = {name: _Stored(paths[file], headers[file][name]) for name, file in files.items()}
    beside = {name: paths[file] for file, header in headers.items() for name in header if name not in files}
    return stored, beside


def _misfit(
    folder: Path,
    config: ConfigFields,
    family: Family,
    reader: WeightReader,
    stored: _Tensors,
    beside: Mapping[str, Path],
) -> str | None:
    """The first tensor that is missing, wrong or left over for that reader."""
    layers = 1 + max((layer for name in stored if (layer := layer_of(name)) is not None), default=-1)
    if not reader.strict and reader.head == "reward" and not layers:
        return None  # Transformers accepts classifiers by other names.
    told = config.get("num_hidden_layers")
    if is_size(told) and told > layers:
        return f"{folder / 'config.json'} says num_hidden_layers {told}, and the weights hold {layers}; {_REMEDY}"
    try:
        shape = family.shape(config)
        wanted, missing = _wanted(shape, reader, stored)
    except (ValueError, TypeError, ArithmeticError):
        return None  # Fields that are no sizes are reported with the config.
    if missing:
        name = missing[0]
        if name in beside:
            return f"{folder / INDEX} does not list tensor {name!r}, which {beside[name].name} holds; add it there"
        count = f"{len(missing)}" if len(missing) < _MOST_MISSING else f"{len(missing)} and more"
        what = f"{folder} lacks {count} of the tensors that its config.json asks for"
        return f"{what}, {name!r} {list(wanted[name])} among them; {_REMEDY}"
    wrong = [name for name, size in wanted.items() if stored[name].entry.shape != size]
    if wrong:
        name = wrong[0]
        what = f"{_of(stored, name)} is {list(stored[name].entry.shape)}, and config.json asks for {list(wanted[name])}"
        return f"{what}{_more(wrong)}; {_REMEDY}"
    left_over = [name for name in stored if name not in wanted and not _is_harmless(name, shape, config, reader)]
    if left_over and reader.strict:
        name = left_over[0]
        what = f"{_of(stored, name)} {list(stored[name].entry.shape)} has no place in the {shape.family}"
        return f"{what} that config.json describes{_more(left_over)}; {_REMEDY}"
    return _dtype_problem({name: stored[name] for name in wanted}, [reader])


def _wanted(shape: ModelShape, reader: WeightReader, stored: _Tensors) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """The tensors that the reader looks for with their shapes, and those of them that are missing."""
    wanted: dict[str, tuple[int, ...]] = {}
    missing: list[str] = []
    for name, size in published_tensors(shape, reader.head):
        if name == SCORE and reader.head == "value" and SCORE not in stored:
            continue
        wanted[name] = size
        if name not in stored:
            missing.append(name)
            if len(missing) == _MOST_MISSING:
                return wanted, missing
    return wanted, missing


def _dtype_problem(tensors: _Tensors, readers: Sequence[WeightReader]) -> str | None:
    wrong = [name for name, tensor in tensors.items() if tensor.entry.dtype not in FLOATING]
    if not wrong or all(reader.quantised for reader in readers):
        return None
    what = f"{_of(tensors, wrong[0])} is {tensors[wrong[0]].entry.dtype}{_more(wrong)}"
    return f"{what}, and weights must be {', '.join(FLOATING[:-1])} or {FLOATING[-1]}; {_DEQUANTISE}"


def _is_harmless(name: str, shape: ModelShape, config: Mapping[str, Any], reader: WeightReader) -> bool:
    """Whether a tensor that the model has no place for is left out by every reader."""
    if name.endswith(DERIVED) or (name == OUTPUT and (shape.tied or reader.head != "lm")):
        return True
    extra = config.get("num_nextn_predict_layers")
    return is_prediction_layer(name, shape.layers, extra if is_size(extra) else 0)


def _of(tensors: _Tensors, name: str) -> str:
    return f"{tensors[name].file}: tensor {name!r}"


def _more(names: Sequence[str]) -> str:
    """How many tensors there are beside the first."""
    return f" (and {len(names) - 1} more alike)" if len(names) > 1 else ""
