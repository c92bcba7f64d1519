"""Reads the files of a source."""

from __future__ import annotations

import os.path
from pathlib import Path

from dagrl.importing.settings import ImportProblem

_MOST_BYTES = 1024 * 1024


def is_file(path: Path) -> bool:
    """Whether the file exists; False for invalid names."""
    return os.path.isfile(path)  # noqa: PTH113 (Path.is_file raises an error for a name that is too long)


def read_file(path: Path) -> bytes:
    """The content of a script or configuration. ImportProblem if it is not a text file of at most 1 MiB."""
    try:
        if path.exists() and not is_file(path):
            raise ImportProblem(f"{path}: is not a regular file; give a script or a YAML file")
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ImportProblem(f"{path}: cannot be read ({error.strerror}); check the path") from error
    if len(content) > _MOST_BYTES:
        raise ImportProblem(f"{path}: has more than {_MOST_BYTES} bytes; give the launch script")
    if b"\0" in content:
        raise ImportProblem(f"{path}: is not a text in UTF-8; give a script or a YAML file")
    return content
