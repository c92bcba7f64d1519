"""Whether folders hold weights, as far as the names of files and small JSON files tell: before torch is imported."""

from __future__ import annotations

from pathlib import Path

from dagrl.validation.json_files import json_object

_CONFIG = "config.json"


class WrongCallError(ValueError):
    """The arguments of a command do not name what it needs."""


def check_is_hf(folder: Path) -> None:
    """WrongCallError where a folder is not a Hugging Face folder; its weights are not looked at."""
    check_is_folder(folder)
    if not (folder / _CONFIG).is_file():
        raise WrongCallError(f"{folder} is no Hugging Face folder: it has no {_CONFIG}")
    config = json_object(folder / _CONFIG)
    if config is None:
        raise WrongCallError(f"{folder / _CONFIG} is not a JSON object; copy the file again")
    if not isinstance(config.get("model_type"), str):
        raise WrongCallError(
            f"{folder / _CONFIG} names no architecture (model_type); name a Hugging Face model's folder"
        )


def check_is_folder(folder: Path) -> None:
    """WrongCallError if `folder` is not a folder."""
    if not folder.is_dir():
        raise WrongCallError(f"{folder} is a file, not a folder" if folder.exists() else f"there is no folder {folder}")
