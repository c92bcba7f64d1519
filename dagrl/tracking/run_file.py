"""Finds files of a run folder that a reader may open: folders of others may hold links, pipes and devices."""

from __future__ import annotations

import stat
from pathlib import Path


def run_file(folder: Path, *names: str) -> Path | None:
    """The file of that name in `folder`; None if there is none.

    ValueError if it is no regular file, so that nothing waits for a pipe, or if a link leads out of the folder.
    """
    path = folder.joinpath(*names)
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is not a regular file; remove it")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{path} lies outside of the run folder, behind a link; remove the link")
    return path


def run_text(folder: Path, *names: str) -> str | None:
    """The text of that file, with replaced bytes where it is not UTF-8; None if there is none."""
    path = run_file(folder, *names)
    return None if path is None else path.read_text(encoding="utf-8", errors="replace")


def best_checkpoint(folder: Path) -> str | None:
    """The name that ``checkpoints/best`` holds. The folder of checkpoints may be a link to another disk."""
    text = run_text(folder / "checkpoints", "best")
    return None if text is None else text.strip()
