"""Keeps the ends of files to which user code prints: it may print without end."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path

END_BYTES = 1 << 20
"""Bytes that are kept of each end."""
_MOST_BYTES = 4 << 20
"""A file of up to this size is kept whole."""
_MARK = b"\n... %d bytes were printed here, and are not kept ...\n"
LOOK_EVERY_S = 0.5
_LOOK_AT_OWN_EVERY_S = 0.1


class LogEnds:
    """A file to which processes append; `cut` removes its middle if it is long."""

    def __init__(self, path: Path) -> None:
        """`path` may be an entry of ``/proc/PID/fd``. It is a regular file, opened for appending by its writers."""
        self._path = path
        self._mark = self._removed = 0

    def cut(self) -> None:
        """Keep the ends of the file if it has grown too long; concurrent output may be lost."""
        with suppress(OSError):  # it is gone
            if self._path.stat().st_size <= _MOST_BYTES:
                return
            file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                size = os.fstat(file).st_size
                last = os.pread(file, END_BYTES, size - END_BYTES)
                self._removed += size - END_BYTES - self._mark - len(last)
                mark = _MARK % self._removed
                self._mark = len(mark)
                # Written over the removed part, so that it needs no space on a full disk.
                os.pwrite(file, mark + last, END_BYTES)
                os.ftruncate(file, END_BYTES + len(mark) + len(last))
            finally:
                os.close(file)


def ends_of(path: Path) -> str:
    """The text of a file, or its ends if it is long. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size <= _MOST_BYTES:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
        first = file.read(END_BYTES)
        file.seek(size - END_BYTES)
        last = file.read(END_BYTES)
    return (first + _MARK % (size - 2 * END_BYTES) + last).decode("utf-8", "replace")


def shortened(text: str) -> str:
    """A text, or its ends if it is long."""
    if len(text) <= _MOST_BYTES:
        return text
    mark = (_MARK % (len(text) - 2 * END_BYTES)).decode()
    return f"{text[:END_BYTES]}{mark}{text[-END_BYTES:]}"


def keep_ends_of_output() -> None:
    """From now on, keep only the ends of what this process and its children print, if that goes to files."""
    # By their own paths: user code may put another file in the place of a descriptor for a while.
    logs = [LogEnds(Path(f"/proc/self/fd/{descriptor}").readlink()) for descriptor in (1, 2) if _is_log(descriptor)]

    def watch() -> None:
        while True:
            time.sleep(_LOOK_AT_OWN_EVERY_S)
            for log in logs:
                log.cut()

    if logs:
        threading.Thread(target=watch, name="ends of output", daemon=True).start()


def _is_log(descriptor: int) -> bool:
    """Whether it is a regular file that is opened for appending: others cannot be cut."""
    with suppress(OSError):
        appends = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
        return bool(appends) and stat.S_ISREG(os.fstat(descriptor).st_mode)
    return False
