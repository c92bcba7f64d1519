"""Recognise folders in Megatron's distributed format by their small text files, without torch."""

from __future__ import annotations

from pathlib import Path

from dagrl.model_files.hf_config import read_json

LATEST = "latest_checkpointed_iteration.txt"
"""Megatron-LM's file beside its checkpoints, with the newest one's iteration, or ``release``."""
CONFIG = "metadata.json"
"""Names the format; it is written last."""
BACKEND = "torch_dist"
METADATA = ".metadata"

_LONGEST_NUMBER = 18


def newest_checkpoint(folder: Path) -> Path:
    """Return `folder`, or the newest checkpoint in it if Megatron-LM saved to it, without ``~``.

    ValueError if the file that should name the newest one is invalid, OSError if it cannot be read.
    """
    folder = folder.expanduser()
    latest = folder / LATEST
    if not latest.is_file():
        return folder
    name = latest.read_text(encoding="utf-8", errors="replace").strip()
    if name.isdecimal() and len(name) <= _LONGEST_NUMBER:
        return folder / f"iter_{int(name):07d}"
    if name != "release":
        raise ValueError(f"{latest} says {name[:40]!r}, and should say an iteration's number or `release`; correct it")
    return folder / name


def check_folder(folder: Path) -> None:
    """Raise ValueError for a folder without the files of a checkpoint in this format, OSError for an unreadable one."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}; give a folder in Megatron's distributed format")
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} has no {CONFIG}, so it is no checkpoint in Megatron's distributed format, or a torn one; give "
            "the folder of one step, for example iter_0000100 or checkpoints/step_10/ENGINE, or make one with "
            "`dagrl convert`"
        )
    try:
        named = read_json(folder / CONFIG).get("sharded_backend")
    except ValueError:
        named = None
    if named != BACKEND:
        kind = named if isinstance(named, str) else f"of no readable {CONFIG}"
        raise ValueError(f"{folder} is in the format {kind}; save it as {BACKEND} (Megatron's `--ckpt-format`)")
    if not (folder / METADATA).is_file():
        raise ValueError(f"{folder} has no {METADATA}, which says where each tensor is stored; copy it again")
    if not any(file.stat().st_size for file in folder.glob("*.distcp")):
        raise ValueError(f"{folder} has no *.distcp files with tensors; copy it again")
