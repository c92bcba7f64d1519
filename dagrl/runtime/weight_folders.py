"""Whether folders hold weights, as far as the names of files and small JSON files tell: before torch is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_CONFIG = "config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_STORED = "metadata.json"
_NEWEST = "latest_checkpointed_iteration.txt"


class WrongCallError(ValueError):
    """The arguments of a command do not name what it needs."""


def check_is_hf(folder: Path, *, with_weights: bool = False) -> None:
    """WrongCallError where a folder is not a Hugging Face folder, or lacks files of its weights, which may be asked."""
    _check_is_folder(folder)
    if not (folder / _CONFIG).is_file():
        raise WrongCallError(f"{folder} is no Hugging Face folder: it has no {_CONFIG}")
    config = _json_object(folder / _CONFIG)
    if not isinstance(config.get("model_type"), str):
        raise WrongCallError(
            f"{folder / _CONFIG} names no architecture (model_type); name a Hugging Face model's folder"
        )
    if not with_weights or (not (folder / _INDEX).is_file() and (folder / _WEIGHTS).is_file()):
        return
    if not (folder / _INDEX).is_file():
        raise WrongCallError(f"{folder} holds neither {_WEIGHTS} nor {_INDEX}: save the model as safetensors")
    files = _json_object(folder / _INDEX).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise WrongCallError(f"{folder / _INDEX} does not say which file holds which weight; copy the file again")
    lost = sorted(file for file in set(files.values()) if not (folder / file).is_file())
    if lost:
        raise WrongCallError(f"{folder} lacks {len(lost)} of its weight files, {lost[0]} among them; copy them again")


def check_is_megatron(folder: Path) -> None:
    """WrongCallError where a folder neither is a checkpoint in Megatron's distributed format nor names one."""
    _check_is_folder(folder)
    if not (folder / _STORED).is_file() and not (folder / _NEWEST).is_file():
        raise WrongCallError(
            f"{folder} is no checkpoint in Megatron's distributed format: it has no {_STORED}; name the folder of one "
            "step, as iter_0000100 or checkpoints/step_10/ENGINE"
        )


def _check_is_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise WrongCallError(f"{folder} is a file, not a folder" if folder.exists() else f"there is no folder {folder}")


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # RecursionError: brackets that are left open
        found = None
    if not isinstance(found, dict):
        raise WrongCallError(f"{path} is not a JSON object; copy the file again")
    return found
