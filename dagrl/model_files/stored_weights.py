"""The weights in a model's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dagrl.config.errors import counted
from dagrl.model_files.tensor_names import OUTPUT

_INDEX = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_TRAINABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class SafetensorsFolder:
    """Weights in a folder of safetensors, with or without an index; one tensor is in memory at a time."""

    def __init__(self, folder: Path, *, tied_output: bool = False) -> None:
        self._folder = folder
        self._files = _files_by_tensor(folder)
        if tied_output:
            self._files.pop(OUTPUT, None)

    def names(self) -> list[str]:
        """All tensors of the folder."""
        return list(self._files)

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor. Raises ValueError for integers, 8-bit floats, NaN and infinite values."""
        with self._open(name) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        place = f"{self._files[name]}: tensor {name!r} {list(tensor.shape)}"
        if tensor.dtype not in _TRAINABLE:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{place} is {kind}; weights must be 16- to 64-bit floats; save the model dequantised")
        check_finite(tensor, place)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape from the file's header."""
        with self._open(name) as file:
            return tuple(file.get_slice(name).get_shape())

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open

        if name not in self._files:
            raise ValueError(f"{self._folder} has no tensor {name!r}: does its config.json belong to these weights?")
        file = self._files[name]
        try:
            with safe_open(file, framework="pt") as opened:
                yield opened
        except SafetensorError as error:
            raise ValueError(f"cannot read tensor {name!r} in {file}: {error}; copy the file again") from error


def check_finite(weights: torch.Tensor, place: str) -> None:
    """Raise ValueError if a tensor has NaN or infinite values, which would otherwise fail later without a reason."""
    # One pass without temporary memory; both results are NaN if any value is.
    if weights.numel() and not all(map(torch.isfinite, torch.aminmax(weights.detach()))):
        raise ValueError(f"{place} has NaN or infinite values; copy it again, or use another checkpoint")


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    """The file of each tensor. Raises ValueError if there is none, or if a file named by the index is missing."""
    from safetensors import SafetensorError, safe_open

    index = folder / _INDEX
    if index.is_file():
        files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        for file in sorted(set(files.values())):
            if not file.is_file():
                lost = sum(holder == file for holder in files.values())
                holds = counted(lost, "tensor")
                raise ValueError(f"{file} is missing: {index.name} says that it holds {holds}; copy it again")
        return files
    single = folder / _SINGLE_FILE
    if not single.is_file():
        raise ValueError(f"{folder} has neither {_SINGLE_FILE} nor {_INDEX}: save the model as safetensors")
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except SafetensorError as error:
        raise ValueError(f"cannot read {single}: {str(error).partition('\n')[0]}; copy the file again") from error
