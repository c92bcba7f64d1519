"""Finds the reason of a server's failure in the logs of its processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SHOWN = 4
"""Lines in a message."""
_PREFIX = re.compile(
    r"(?:\((?P<process>\S+ pid=\d+)\) )?"
    r"(?:(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^]]+\] ?|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^]]*\] )?"
)
"""Prefix of a line from the libraries of servers."""
_FRAME = re.compile(r' *File ".+", line \d+| +\[Previous line repeated ')
_CODE = " " * 4
"""Indentation of the lines below a frame of a traceback."""
_AROUND_TRACEBACKS = ("Traceback (most recent", "During handling of the above", "The above exception was the direct")
_PROGRESS_BAR = re.compile(r"\d+%(?: Completed )?\|")


@dataclass(frozen=True, slots=True)
class Line:
    """A line without the prefix of its library."""

    process: str
    text: str
    is_error: bool
    is_exception: bool
    """Whether it ends a traceback."""


def relevant_lines(log: str) -> Iterator[Line]:
    """Lines that may explain how a process ended: exceptions without frames of their tracebacks, no progress bars."""
    in_traceback: set[str] = set()
    for line in log.splitlines():
        prefix = _PREFIX.match(line)
        assert prefix is not None, "all of its parts are optional"
        process, text = prefix["process"] or "", line[prefix.end() :]
        after_frame = process in in_traceback
        in_traceback.discard(process)
        if _FRAME.match(text) or (after_frame and text.startswith(_CODE)):
            in_traceback.add(process)
        elif text.strip(" ^~") and not text.startswith(_AROUND_TRACEBACKS) and not _PROGRESS_BAR.search(text):
            is_error = prefix["level"] not in ("DEBUG", "INFO", "WARNING")
            yield Line(process, text.strip(), is_error, is_error and after_frame)


class ServerLogs:
    """The files that a server's processes log to from now on. An earlier server may have written to them."""

    def __init__(self, folder: Path, pattern: str) -> None:
        """`pattern` matches the files' names, as in `Path.glob`."""
        self._folder, self._pattern = folder, pattern
        self._earlier = {path: path.stat().st_size for path in folder.glob(pattern)}

    def failure_text(self) -> str:
        """The exception of the process that failed first, or else the last output, for the end of a message."""
        what, texts, newest = "", [], None
        # The process that failed first wrote its last line first.
        for path in sorted(self._folder.glob(self._pattern), key=lambda path: path.stat().st_mtime):
            lines = list(relevant_lines(path.read_bytes()[self._earlier.get(path, 0) :].decode(errors="replace")))
            first = next((index for index, line in enumerate(lines) if line.is_exception), None)
            if first is not None:
                of_process = [line for line in lines[first:] if line.process == lines[first].process and line.is_error]
                what, texts, newest = "its first error", _texts(of_process)[:_SHOWN], path
                break
            if lines or newest is None:
                what, texts, newest = "its last output", _texts(lines)[-_SHOWN:], path
        if newest is None:
            return ""
        shown = f"; {what}: {' | '.join(texts)}" if texts else ""
        return f"{shown}; the whole log is {newest}"


def _texts(lines: list[Line]) -> list[str]:
    return list(dict.fromkeys(line.text for line in lines))
