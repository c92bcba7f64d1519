"""Checks of a folder's weight files against its config.json: complete files, and all tensors in loadable dtypes and
shapes.

Reads headers only. The tensors of a known family are checked; otherwise files and their index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dagrl.backends.backend import WeightReader
from dagrl.backends.families.base import Family
from dagrl.backends.families.config_fields import ConfigFields, is_size
from dagrl.backends.families.registry import find_family
from dagrl.backends.families.tensors import published_tensors
from dagrl.backends.registry import backend_of
from dagrl.config.schema import Pipeline
from dagrl.model_files.hf_config import HfConfig, folder_config, read_json
from dagrl.model_files.safetensors_header import FLOATING, HeaderEntry, read_header
from dagrl.model_files.tensor_names import DERIVED, OUTPUT, QUANTISED, SCORE, is_prediction_layer, layer_of

INDEX, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"

_MOST_MISSING = 1000
"""Missing tensors after which the check of a config ends."""
_REMEDY = "give the config.json that belongs to the weights, or copy the folder again"
_DEQUANTISE = "save the model dequantised, in bfloat16 and without quantization_config"


class _StoredTensor(NamedTuple):
    file: Path
    entry: HeaderEntry


_Tensors = Mapping[str, _StoredTensor]


def readers_of(pipeline: Pipeline, engines: Iterable[str]) -> list[WeightReader]:
    """Return the distinct ways in which these engines read the weights of their model's folder."""
    specs = (pipeline.engines[name] for name in engines)
    readers = (backend_of(spec).weight_reader(spec) for spec in specs)
    return list(dict.fromkeys(reader for reader in readers if reader is not None and reader.checked))


def may_be_quantised(pipeline: Pipeline, engines: Sequence[str]) -> bool:
    """Whether all these engines load the model by libraries that dequantise it, and no engine trains it."""
    specs = [pipeline.engines[name] for name in engines]
    readers = [backend_of(spec).weight_reader(spec) for spec in specs]
    return bool(readers) and all(reader is not None and reader.quantised for reader in readers)


def quantisation_problem(path: Path, config: HfConfig) -> str | None:
    """Return the message for a config.json of quantised weights."""
    for field in ("quantization_config", "compression_config"):
        if quantised := config.get(field):
            method = quantised.get("quant_method") if isinstance(quantised, dict) else None
            named = f", {method}" if isinstance(method, str) else ""
            return f"{path} says that the weights are quantised ({field}{named}), and cannot be trained; {_DEQUANTISE}"
    return None


def check_model_folder(folder: Path) -> None:
    """Check the config and the weights of a language model's folder. ValueError with the first problem."""
    config = folder_config(folder)
    family = find_family(config["model_type"])
    if family and (left_out := family.sizes_left_out(config)):
        path = folder / "config.json"
        raise ValueError(f"{path} does not say {left_out[0]}, a size of the model; copy the file again, or add it")
    if problem := quantisation_problem(folder / "config.json", config):
        raise ValueError(problem)
    check_weights(folder, config, [WeightReader()])


def check_weights(folder: Path, config: HfConfig | None, readers: Sequence[WeightReader]) -> None:
    """Check the weights of a folder. ValueError with the first problem, OSError if a file cannot be read.

    `config` is None if it is unknown or wrong.
    """
    if not readers:
        return
    index = folder / INDEX
    stored = _sharded(folder, index) if index.is_file() else _single(folder)
    if config is None:
        return
    scale = next((name for name in stored if name.endswith(QUANTISED)), None)
    quantised = scale is not None or quantisation_problem(folder, config) is not None
    family = find_family(config.get("model_type"))
    if family is None or not family.has_tables:
        if not quantised:
            _check_dtypes({name: stored[name] for name in stored if name.endswith(".weight")}, readers)
        return
    for reader in readers:
        if not quantised:
            _check_tensors(folder, family, family.fields(config), reader, stored)
        elif scale is not None and not reader.quantised:
            what = f"{_of(stored, scale)} belongs to quantised weights, which cannot be trained"
            raise ValueError(f"{what}; {_DEQUANTISE}")


def _single(folder: Path) -> dict[str, _StoredTensor]:
    path = folder / SINGLE_FILE
    if not path.is_file():
        old = " (only PyTorch's .bin files)" if any(folder.glob("*.bin")) else ""
        raise ValueError(f"{folder} has no safetensors weights{old}; save the model as safetensors")
    return {name: _StoredTensor(path, entry) for name, entry in _header(path).items()}


def _header(path: Path) -> dict[str, HeaderEntry]:
    try:
        return read_header(path)
    except ValueError as error:
        raise ValueError(f"{path} {error}; copy the file again") from error


def _sharded(folder: Path, index: Path) -> dict[str, _StoredTensor]:
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{index} does not say which file holds which weight; copy the file again")
    if outside := [name for name in files.values() if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise ValueError(f"{index} names a file outside its folder, {outside[0]!r}; copy the index and its files again")
    paths = {name: folder / name for name in sorted(set(files.values()))}
    if lost := [name for name, path in paths.items() if not path.is_file()]:
        raise ValueError(f"{folder} lacks {len(lost)} of its weight files, {lost[0]} among them; copy them again")
    headers = {name: _header(path) for name, path in paths.items()}
    if absent := [name for name, file in files.items() if name not in headers[file]]:
        what = f"{index} says that {files[absent[0]]} holds tensor {absent[0]!r}, and it does not"
        raise ValueError(f"{what}{_more(absent)}; copy the index and its files again")
    return {name: _StoredTensor(paths[file], headers[file][name]) for name, file in files.items()}


def _check_tensors(
    folder: Path,
    family: Family,
    config: ConfigFields,
    reader: WeightReader,
    stored: _Tensors,
) -> None:
    layers = 1 + max((layer for name in stored if (layer := layer_of(name)) is not None), default=-1)
    if not reader.strict and reader.head == "reward" and not layers:
        return  # Transformers accepts classifiers by other names.
    path, declared = folder / "config.json", config.maps[0].get("num_hidden_layers")
    if is_size(declared) and declared > layers:
        raise ValueError(f"{path} says num_hidden_layers {declared}, and the weights hold {layers}; {_REMEDY}")
    try:
        shape = family.shape(config)
    except (ValueError, TypeError, ArithmeticError):
        return  # Invalid sizes are reported with the config.
    wanted: dict[str, tuple[int, ...]] = {}
    missing: list[str] = []
    for name, size in published_tensors(shape, reader.head):
        if name == SCORE and reader.head == "value" and SCORE not in stored:
            continue  # A value head starts as zeros.
        wanted[name] = size
        if name not in stored:
            missing.append(name)
            if len(missing) == _MOST_MISSING:
                break
    if missing:
        count = f"{len(missing)}" if len(missing) < _MOST_MISSING else f"{len(missing)} and more"
        what = f"{folder} lacks {count} of the tensors that its config.json asks for, {missing[0]!r}"
        raise ValueError(f"{what} {list(wanted[missing[0]])} among them; {_REMEDY}")
    wrong = [name for name, size in wanted.items() if stored[name].entry.shape != size]
    if wrong:
        stored_shape, wanted_shape = list(stored[wrong[0]].entry.shape), list(wanted[wrong[0]])
        what = f"{_of(stored, wrong[0])} is {stored_shape}, and config.json asks for {wanted_shape}"
        raise ValueError(f"{what}{_more(wrong)}; {_REMEDY}")
    predicting = config.optional("num_nextn_predict_layers") or 0
    left_over = [
        name
        for name in stored
        if name not in wanted
        and not name.endswith(DERIVED)
        and not (name == OUTPUT and (shape.tied or reader.head != "lm"))
        and not is_prediction_layer(name, shape.layers, predicting)
    ]
    if left_over and reader.strict:
        what = f"{_of(stored, left_over[0])} {list(stored[left_over[0]].entry.shape)} has no place in the"
        raise ValueError(f"{what} {shape.family} that config.json describes{_more(left_over)}; {_REMEDY}")
    _check_dtypes({name: stored[name] for name in wanted}, [reader])


def _check_dtypes(tensors: _Tensors, readers: Sequence[WeightReader]) -> None:
    wrong = [name for name, tensor in tensors.items() if tensor.entry.dtype not in FLOATING]
    if wrong and not all(reader.quantised for reader in readers):
        what = f"{_of(tensors, wrong[0])} is {tensors[wrong[0]].entry.dtype}{_more(wrong)}"
        raise ValueError(f"{what}, and weights must be {', '.join(FLOATING[:-1])} or {FLOATING[-1]}; {_DEQUANTISE}")


def _of(tensors: _Tensors, name: str) -> str:
    return f"{tensors[name].file}: tensor {name!r}"


def _more(names: Sequence[str]) -> str:
    """Return the number of tensors beside the first, in words."""
    return f" (and {len(names) - 1} more alike)" if len(names) > 1 else ""
