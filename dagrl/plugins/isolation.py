"""Imports user modules in a forked child process with bounded time and memory, so that they cannot harm a check.

A module may exit, loop, crash, print, change the working directory or start threads when it is imported. Within
`isolated_imports`, questions about user functions go to a child, which starts within milliseconds; the parent never
imports their modules.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import re
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from dagrl.plugins.custom import import_failure, load_function
from dagrl.plugins.source import function_in_source

IMPORT_SECONDS = 60.0
"""Longest wait for a module."""
_NOTICE_AFTER_S = 10.0
"""Seconds after which a message announces the wait."""
_POLL_S = 0.2
_STACK_S = 5.0
"""Time for a child that hangs to write its stack."""
_UNREACHABLE = 81
"""Exit code of a child that can no longer read questions or write answers."""
_PR_SET_PDEATHSIG = 1
_FORK = multiprocessing.get_context("fork")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in ', re.MULTILINE)


@contextmanager
def isolated_imports(*, seconds: float = IMPORT_SECONDS, memory: int | None = None) -> Iterator[None]:
    """Within the context, `ask` imports user modules in a child process; nested contexts share the child.

    A module has `seconds` and `memory`, in bytes: by default half of the free memory. The child starts with the first
    question.
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


@contextmanager
def without_imports() -> Iterator[None]:
    """Within the context, `ask` reads the source of user modules, and imports no module."""
    global _imports_nothing
    outer, _imports_nothing = _imports_nothing, True
    try:
        yield
    finally:
        _imports_nothing = outer


def ask[Result](place: str, question: Callable[..., Result], *arguments: object, folder: Path | None) -> Result:
    """``question(function, *arguments)`` about the user's ``module:function`` at `place`.

    Within `isolated_imports` a child process computes the result, so question, arguments and result are pickled. Raises
    the ValueError of `load_function` or the question, and ValueError if the child ends or times out.
    """
    if _imports_nothing and not place.startswith("dagrl."):
        return question(function_in_source(place, folder), *arguments)
    if _current is None or place.startswith("dagrl."):
        return question(load_function(place, folder), *arguments)
    return _current.ask(place, folder, question, arguments)


class _Imports:
    """The child of a context, started with the first question, and again after a module ended it."""

    def __init__(self, seconds: float, memory: int | None) -> None:
        self._seconds, self._memory = seconds, memory
        self._child: _Child | None = None
        self._failures: dict[str, str] = {}
        """Module -> reason for not importing it again."""

    def ask(
        self, place: str, folder: Path | None, question: Callable[..., object], arguments: tuple[object, ...]
    ) -> Any:
        module = place.partition(":")[0]
        if module in self._failures:
            raise ValueError(self._failures[module])
        child = self._child = self._child or _Child(self._memory)
        shared = bool(child.modules - {module})
        child.modules.add(module)
        answer = child.answer((place, folder, question, arguments), self._seconds)
        if answer is not None:
            return _result_of(answer, module)
        timed_out = child.exit_code is None
        if timed_out:
            child.abort()
        how = f"takes more than {self._seconds:g} s" if timed_out else _how_it_ended(child.exit_code)
        where = child.where(folder)
        self.close()
        if shared and not timed_out:
            # A thread or an alarm of another module may have ended the process.
            return self.ask(place, folder, question, arguments)
        remedy = "do such work when the function is called" if timed_out else "remove that from it, or from its imports"
        self._failures[module] = f"importing {module!r} {how}{where}; {remedy}"
        raise ValueError(self._failures[module])

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


_current: _Imports | None = None
_imports_nothing = False


class _Child:
    """A forked process that answers questions."""

    def __init__(self, memory: int | None) -> None:
        self._pipe, pipe = _FORK.Pipe()
        self._traces = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self.modules: set[str] = set()
        self._process = _FORK.Process(target=_serve, args=(pipe, self._pipe, self._traces.fileno(), memory))
        with warnings.catch_warnings():
            # Libraries that start threads handle forks themselves.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        pipe.close()

    @property
    def exit_code(self) -> int | None:
        """The exit code, or the negative number of the signal that ended the process; None while it runs."""
        return self._process.exitcode

    def answer(self, request: tuple[object, ...], seconds: float) -> bytes | None:
        """The answer to a question; None if the process ends or times out."""
        begun, announced = time.monotonic(), False
        with suppress(OSError):
            self._pipe.send(request)
        while (waited := time.monotonic() - begun) < seconds:
            # Checked in addition to the pipe, which a process started by the module may keep open.
            ended = self.exit_code is not None
            try:
                if self._pipe.poll(0 if ended else _POLL_S):
                    return self._pipe.recv_bytes()
            except (EOFError, OSError):
                time.sleep(_POLL_S)  # The module closed the pipe and continues.
            if ended:
                return None
            if waited > _NOTICE_AFTER_S and not announced:
                announced, module = True, str(request[0]).partition(":")[0]
                print(f"dagrl: importing {module}, for at most {seconds:g} s ...", file=sys.stderr, flush=True)
        return None

    def abort(self) -> None:
        """Make a process that hangs write its stack and end."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid or 0, signal.SIGABRT)
        self._process.join(_STACK_S)

    def where(self, folder: Path | None) -> str:
        """`` at FILE:LINE`` of a crash: the innermost line in the user's folder, else in any file."""
        self._traces.seek(0)
        frames = _FRAME.findall(self._traces.read().decode(errors="replace"))
        frames = [frame for frame in frames if not frame[0].startswith("<") and "importlib" not in frame[0]]
        own = [frame for frame in frames if folder and Path(frame[0]).is_relative_to(folder.resolve())]
        return next((f" at {file}:{line}" for file, line in own or frames), "")

    def close(self) -> None:
        """End the process, and processes that user modules started in its session."""
        self._process.kill()
        self._process.join()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._pipe.close()
        self._traces.close()


def _how_it_ended(code: int | None) -> str:
    """The end of the process, as the rest of a sentence about the module."""
    assert code is not None, "the process runs"
    if code == _UNREACHABLE:
        return "closes file descriptors that it has not opened"
    if code >= 0:
        return f"ends the process with exit code {code}, as os._exit does"
    if -code == signal.SIGKILL:
        return "gets the process killed (SIGKILL), as happens where memory runs out"
    return f"crashes the process ({signal.Signals(-code).name})"


def _result_of(answer: bytes, module: str) -> Any:
    try:
        found, result = pickle.loads(answer)  # noqa: S301 - written by our own child
    except Exception as error:
        message = f"the module {module!r} declares its functions with its own objects; use plain numbers and text"
        raise ValueError(message) from error
    if not found:
        raise ValueError(result)
    return result


def _serve(pipe: Connection, parents: Connection, traces: int, memory: int | None) -> NoReturn:
    """In the child: answer questions until the parent closes the pipe. Stacks of crashes go to the file `traces`."""
    code = _UNREACHABLE
    try:
        parents.close()
        cut_off(memory, traces)
        with suppress(EOFError):
            while True:
                pipe.send_bytes(_answer(*pipe.recv()))
        code = 0
    finally:
        # atexit handlers and threads of user modules must not keep the process alive.
        os._exit(code)


def cut_off(memory: int | None, traces: int | None = None) -> None:
    """Keep this forked child from the terminal and the parent's output, and limit its memory; it ends with the parent.

    Args:
        memory: bytes that it may allocate beyond its current ones; None for half of the machine's free memory.
        traces: the file descriptor for stacks of crashes.
    """
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # If memory runs out nevertheless, the kernel ends this process first.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    nothing = Path(os.devnull).open("r+", encoding="utf-8")  # noqa: SIM115 - open until the process ends
    for descriptor in (0, 1, 2):
        os.dup2(nothing.fileno(), descriptor)
    sys.stdin = sys.stdout = sys.stderr = nothing
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    # enable() would keep handlers that a library has since replaced.
    faulthandler.disable()
    if traces is not None:
        faulthandler.enable(traces, all_threads=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory(memory)


def _limit_memory(memory: int | None) -> None:
    import psutil

    free = psutil.virtual_memory().available // 2 if memory is None else memory
    most, hard = psutil.Process().memory_info().data + free, resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _answer(place: str, folder: Path | None, question: Callable[..., object], arguments: tuple[object, ...]) -> bytes:
    """A pickled pair: whether the question has a result, and the result or the error message."""
    try:
        return pickle.dumps((True, question(load_function(place, folder), *arguments)))
    except ValueError as error:
        return pickle.dumps((False, str(error)))
    except BaseException as error:  # noqa: BLE001 - user modules may raise anything
        return pickle.dumps((False, import_failure(place.partition(":")[0], error, folder)))
