"""Reads the new lines of a file that grows."""

from __future__ import annotations

import os
from pathlib import Path

from dagrl.tracking.run_file import run_file

_CHUNK = 1 << 24
"""Bytes in a read, so that a file of gigabytes is not in memory twice."""


class Tail:
    """Lines of a file, each once. It begins anew if the file is replaced, or is shorter than before."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self.generation = 0
        """Counts the times that earlier lines became invalid."""
        self.unfinished = False
        """Whether the file ended within a line when it was read."""

    def new_lines(self) -> list[str]:
        """Whole lines that were added since the last call; none if there is no file.

        ValueError as in `run_file`, OSError if it cannot be read.
        """
        path = run_file(self._folder, self._name)
        if path is None:
            self._begin_anew(None)
            return []
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._offset:
                self._begin_anew(identity)
            file.seek(self._offset)
            lines: list[str] = []
            rest = b""
            while chunk := file.read(_CHUNK):
                *whole, rest = (rest + chunk).split(b"\n")
                lines += (line.decode(errors="replace") for line in whole)
                self._offset += sum(len(line) + 1 for line in whole)
        self.unfinished = bool(rest)
        # The last line of a timeline is its closing bracket, which the next event replaces.
        if lines and lines[-1] == "]":
            lines.pop()
            self._offset -= len("]\n")
        return lines

    def _begin_anew(self, identity: tuple[int, int] | None) -> None:
        if self._identity is not None:
            self.generation += 1
        self._identity, self._offset = identity, 0
