"""User modules are imported in a child process of bounded time and memory, so that they cannot harm a check.

A module may exit, loop, crash, print, change the working directory or start threads when it is imported. Within
`isolated_imports`, questions about user modules go to a forked child, which imports them; the parent never does.
"""

from __future__ import annotations

import os
import pickle
import re
import select
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dagrl.graph.plugins.import_child import LENGTH_BYTES, UNREACHABLE, serve

IMPORT_SECONDS = 60.0
"""Longest wait for a module."""
_TOLD_AFTER_S = 10.0
"""From then on the user is told of the wait."""
_LOOK_AGAIN_S = 0.2
_STACK_S = 1.0
"""Time for a child to write the stack of where it hangs."""
_OWN = "dagrl."

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in ', re.MULTILINE)


@contextmanager
def isolated_imports(*, seconds: float = IMPORT_SECONDS, memory: int | None = None) -> Iterator[None]:
    """Within the context, `ask` imports user modules in a child process; within another such one, in the same child.

    A module has `seconds` and `memory`, in bytes: half of what is free by default. Where nothing asks for a user
    module, there is no child.
    """
    global _current
    if _current is not None:
        yield
        return
    _current = _Imports(seconds, memory)
    try:
        yield
    finally:
        _current.close()
        _current = None


def ask[Result](place: str, question: Callable[..., Result], *arguments: Any, folder: Path | None) -> Result:
    """``question(*arguments, folder)`` on the user's ``module:function`` at `place`.

    Within `isolated_imports` a child process finds the result, so that question, arguments and result are pickled.
    ValueError like the question, and with one sentence where the child ends or takes too long.
    """
    module = place.partition(":")[0]
    if _current is None or module.startswith(_OWN):
        return question(*arguments, folder)
    return _current.ask(module, folder, question, (*arguments, folder))


@dataclass(slots=True)
class _Child:
    """A forked process that answers, and which modules it was asked about."""

    process: int
    requests: int
    answers: int
    traces: Any
    modules: set[str] = field(default_factory=set)
    status: int | None = None
    """How it ended, as `os.waitpid` says it."""

    def ended(self) -> bool:
        """Whether the process has ended."""
        if self.status is None:
            process, status = os.waitpid(self.process, os.WNOHANG)
            self.status = status if process else None
        return self.status is not None

    def stack(self) -> list[tuple[str, int]]:
        """Files and lines where it crashed or was stopped, the innermost first."""
        self.traces.seek(0)
        text = self.traces.read().decode(errors="replace")
        return [(found["file"], int(found["line"])) for found in _FRAME.finditer(text)]

    def close(self) -> None:
        """End the process, and those that user modules have started in its session."""
        if not self.ended():
            os.kill(self.process, signal.SIGKILL)
            self.status = os.waitpid(self.process, 0)[1]
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process, signal.SIGKILL)
        os.close(self.requests)
        os.close(self.answers)
        self.traces.close()


class _Imports:
    """The child of a context, made when the first module is asked about, and anew where a module has ended it."""

    def __init__(self, seconds: float, memory: int | None) -> None:
        self._seconds = seconds
        self._memory = memory
        self._child: _Child | None = None
        self._failures: dict[str, str] = {}
        """Module -> why it is not asked about again."""

    def ask(self, module: str, folder: Path | None, question: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if module in self._failures:
            raise ValueError(self._failures[module])
        request = pickle.dumps((module, folder, question, arguments))
        child = self._child = self._child or _fork(_free_bytes() // 2 if self._memory is None else self._memory)
        shared = bool(child.modules - {module})
        child.modules.add(module)
        answer = self._answer(child, module, request)
        if answer is not None:
            return _result_of(answer, module)
        timed_out = not child.ended()
        how = self._timed_out(child) if timed_out else _how_it_ended(child)
        where = _own_line(child.stack(), folder)
        self.close()
        if shared and not timed_out:
            # Another module may have left a thread or an alarm that ended the process.
            return self.ask(module, folder, question, arguments)
        remedy = "do such work when the function is called" if timed_out else "take that out of it, or of its imports"
        self._failures[module] = f"importing {module!r} {how}{f' at {where}' if where else ''}; {remedy}"
        raise ValueError(self._failures[module])

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _answer(self, child: _Child, module: str, request: bytes) -> bytes | None:
        """The answer of the child; None where it has ended, or gives none in time."""
        begun, told, data = time.monotonic(), False, bytearray()
        with suppress(BrokenPipeError):
            _write(child.requests, len(request).to_bytes(LENGTH_BYTES, "little") + request)
        while (waited := time.monotonic() - begun) < self._seconds:
            # Its end is looked for too: a process that it has started may hold the pipe open.
            ended = child.ended()
            while select.select([child.answers], [], [], 0 if ended else _LOOK_AGAIN_S)[0]:
                piece = os.read(child.answers, 1 << 16)
                data += piece
                length = int.from_bytes(data[:LENGTH_BYTES], "little")
                if len(data) >= LENGTH_BYTES and len(data) - LENGTH_BYTES >= length:
                    return bytes(data[LENGTH_BYTES:])
                if not piece:
                    time.sleep(_LOOK_AGAIN_S)
                    break
            if ended:
                return None
            if waited > _TOLD_AFTER_S and not told:
                told = True
                print(f"dagrl: importing {module}, for at most {self._seconds:g} s ...", file=sys.stderr, flush=True)
        return None

    def _timed_out(self, child: _Child) -> str:
        """Have a child that hangs write its stack."""
        with suppress(ProcessLookupError):
            os.kill(child.process, signal.SIGABRT)
        end = time.monotonic() + _STACK_S
        while not child.ended() and time.monotonic() < end:
            time.sleep(0.01)
        return f"takes more than {self._seconds:g} s"


def _result_of(answer: bytes, module: str) -> Any:
    """The result of the child. ValueError if the child reports a fault."""
    try:
        found, result = pickle.loads(answer)  # noqa: S301 - of our own child
    except Exception as error:
        message = f"the module {module!r} declares its functions with objects of its own; use plain numbers and text"
        raise ValueError(message) from error
    if not found:
        raise ValueError(result)
    return result


_current: _Imports | None = None
"""That of the context."""


def _fork(memory: int | None) -> _Child:
    incoming, requests = os.pipe()
    answers, outgoing = os.pipe()
    traces = tempfile.TemporaryFile()  # noqa: SIM115 - the child closes with it
    with warnings.catch_warnings():
        # Threads, where there are any, are those of libraries that see to forks themselves.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        os.close(requests)
        os.close(answers)
        serve(incoming, outgoing, traces.fileno(), memory)
    os.close(incoming)
    os.close(outgoing)
    return _Child(process, requests, answers, traces)


def _free_bytes() -> int:
    """Memory that the machine has left."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _how_it_ended(child: _Child) -> str:
    assert child.status is not None
    if os.WIFEXITED(child.status) and os.WEXITSTATUS(child.status) == UNREACHABLE:
        return "closes file descriptors that it has not opened"
    if os.WIFEXITED(child.status):
        return f"ends the process with exit code {os.WEXITSTATUS(child.status)}, as os._exit does"
    number = os.WTERMSIG(child.status)
    if number == signal.SIGKILL:
        return "gets the process killed (SIGKILL), as happens where memory runs out"
    return f"crashes the process ({signal.Signals(number).name})"


def _own_line(stack: list[tuple[str, int]], folder: Path | None) -> str | None:
    """The innermost line in the user's folder, else in any file."""
    files = [(file, line) for file, line in stack if not file.startswith("<") and "importlib" not in file]
    own = [each for each in files if folder and Path(each[0]).is_relative_to(folder.resolve())]
    file, line = next(iter(own or files), (None, None))
    return f"{file}:{line}" if file else None


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
