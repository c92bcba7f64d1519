"""Recognise folders in Megatron's distributed format by their small text files."""

from __future__ import annotations

from pathlib import Path

from dagrl.models.hf_config import read_json

LATEST = "latest_checkpointed_iteration.txt"
"""In the folder above checkpoints of Megatron-LM: the newest one's iteration, or ``release``."""
CONFIG = "metadata.json"
"""Names the format; it is written last."""

_LONGEST_NUMBER = 18


def newest_checkpoint(folder: Path) -> Path:
    """Return `folder`, or the newest checkpoint in it if Megatron-LM saved to it.

    ValueError where the file that names the newest one does not, OSError where it cannot be read.
    """
    latest = folder / LATEST
    if not latest.is_file():
        return folder
    name = latest.read_text(encoding="utf-8", errors="replace").strip()
    if name.isdecimal() and len(name) <= _LONGEST_NUMBER:
        return folder / f"iter_{int(name):07d}"
    if name != "release":
        raise ValueError(f"{latest} says {name[:40]!r}, and should say an iteration's number or `release`; correct it")
    return folder / name


def format_of(folder: Path) -> str | None:
    """Return the format that a checkpoint's metadata.json names; None where it names none."""
    try:
        named = read_json(folder / CONFIG).get("sharded_backend")
    except ValueError:
        return None
    return named if isinstance(named, str) else None
