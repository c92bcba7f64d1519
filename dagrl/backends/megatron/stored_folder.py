"""Folders in Megatron's distributed format, as far as small text files tell."""

from __future__ import annotations

import json
from pathlib import Path

LATEST = "latest_checkpointed_iteration.txt"
"""In the folder above checkpoints of Megatron-LM: the newest one's iteration, or ``release``."""
CONFIG = "metadata.json"
"""Names the format; it is written last."""

_LONGEST_NUMBER = 18


def newest_checkpoint(folder: Path) -> Path:
    """The checkpoint that `folder` means: itself, or the newest in a folder that Megatron-LM saved to.

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
    """The format that a checkpoint's metadata.json names; None where it cannot be read as JSON with one."""
    try:
        content = json.loads((folder / CONFIG).read_bytes())
    except (ValueError, RecursionError):  # RecursionError: brackets that are left open
        return None
    named = content.get("sharded_backend") if isinstance(content, dict) else None
    return named if isinstance(named, str) else None
