"""Calls of user functions by a worker.

Any exception of a function becomes one error with its line. A process that a function forks ends when it returns from
the call, and does not continue as a second worker. If the worker's process ends within a call, a file names it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dagrl.plugins.custom import UserFunction, name_of, raised_by

FOLDER = ".calls"
"""Folder of these files in a run folder."""
_FILE_BYTES = 1024
_MOST_NAMED = 3


class UserFunctionError(Exception):
    """A user's function failed; the message names its exception and the line. The cause is the exception."""


class _CallRecord:
    """The calls in progress, and the file that lists them."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._file = -1
        self._running: dict[int, str] = {}
        self._lock = threading.Lock()

    def note(self, what: str | None) -> None:
        """Record the current call of this thread, or None after it."""
        if self.path is None:
            return
        # A disk may be full, and the call does not depend on the file.
        with self._lock, suppress(OSError):
            if what is None:
                self._running.pop(threading.get_ident(), None)
            else:
                self._running[threading.get_ident()] = what
            if self._file < 0:
                # The run folder may be on this machine alone.
                self.path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.path.parent.mkdir(exist_ok=True)
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            named = [*self._running.values()]
            others = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
            shown = ("; ".join(named[:_MOST_NAMED]) + others).encode("utf-8", "replace")[:_FILE_BYTES]
            os.pwrite(self._file, shown.ljust(_FILE_BYTES), 0)


_record = _CallRecord()


def record_calls(run_dir: Path, host: str) -> None:
    """From now on, a file of the run folder lists the user functions that this process calls."""
    _record.path = _file_of(run_dir, host, os.getpid())
    # Hosts and processes of containers may have the names of earlier ones.
    with suppress(OSError):
        _record.path.unlink(missing_ok=True)


def recorded_call(run_dir: Path, host: str, pid: int) -> str:
    """Return the current or last recorded call of a process; empty if unknown."""
    try:
        return _file_of(run_dir, host, pid).read_bytes()[:_FILE_BYTES].decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _file_of(run_dir: Path, host: str, pid: int) -> Path:
    return run_dir / FOLDER / f"{host}-{pid}"


def call(function: UserFunction, named: Mapping[str, object], *given: object, about: str = "") -> Any:
    """Call a user's function with arguments by name and by position. Raises UserFunctionError for any exception.

    `about` describes the purpose of the call, for example the sample.
    """
    with within_call(function, about):
        try:
            return function(*given, **named)
        except BaseException as error:  # a user's function may raise anything
            raise UserFunctionError(raised_by(function, error)) from error


def call_or_stop(place: str, function: UserFunction, named: Mapping[str, object], *given: object) -> Any:
    """`call` the function at `place`. Raises ValueError with the place for any exception."""
    try:
        return call(function, named, *given)
    except UserFunctionError as error:
        raise ValueError(f"{place} {error}") from error.__cause__


@contextmanager
def within_call(function: UserFunction, about: str = "") -> Iterator[None]:
    """Context for a call of a user's function, for callers that handle its errors themselves."""
    _record.note(", ".join(filter(None, (name_of(function), about))))
    try:
        with ending_children(function):
            yield
    finally:
        _record.note(None)


@contextmanager
def ending_children(function: UserFunction) -> Iterator[None]:
    """End a process that the function forked at the end of the context."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            message = f"{name_of(function)} has forked this process, which returned from the call and ends here\n"
            with suppress(OSError):
                os.write(2, message.encode("utf-8", "replace"))
            os._exit(1)
