"""Writes several files that appear together, complete, or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STAGE = ".unfinished"


@contextmanager
def all_or_nothing(folder: Path) -> Iterator[Path]:
    """Context with a temporary folder inside `folder`, whose files are moved into `folder` when the context ends
    without an error.

    Nothing else in `folder` changes. Leftovers of a killed run are removed by the next one. ValueError if another run
    writes to `folder` at the same time, or it cannot be a folder.
    """
    stage = folder / _STAGE
    try:
        stage.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"--local_dir {folder} cannot be a folder: a file is in its way; choose another") from error
    except OSError as error:
        raise ValueError(f"--local_dir {folder} cannot be made ({error.strerror}); choose another") from error
    with (stage / "lock").open("w") as lock:
        _take(lock.fileno(), stage, folder)
        try:
            for left in stage.iterdir():
                if left.name != "lock":
                    left.unlink()
            yield stage
            for path in sorted(stage.iterdir()):
                if path.name != "lock":
                    _sync(path)
                    path.replace(folder / path.name)
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def _take(lock: int, stage: Path, folder: Path) -> None:
    busy = ValueError(f"another run is writing to {folder}; wait for its end, or choose another --local_dir")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise busy from error
    # A run that has just ended may have removed the lock file between opening and locking it.
    try:
        same = os.path.samestat(os.fstat(lock), (stage / "lock").stat())
    except FileNotFoundError as error:
        raise busy from error
    if not same:
        raise busy


def _sync(path: Path) -> None:
    """Contents reach the disk before the name, so that a power cut cannot leave an empty file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
