"""Imports user modules in a forked child process with bounded time and memory, so that they cannot harm a check.

A module may exit, loop, crash, print, change the working directory or start threads when it is imported. Within
`isolated_imports`, questions about user modules go to a child, which starts within milliseconds; the parent never
imports them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import re
import resource
import select
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from dagrl.graph.plugins.custom import import_failure

IMPORT_SECONDS = 60.0
"""Longest wait for a module."""
_NOTICE_AFTER_S = 10.0
"""After this time the user is told about the wait."""
_POLL_S = 0.2
_STACK_S = 1.0
"""Time for a child that hangs to write its stack."""
_LENGTH_BYTES = 8
"""Each answer is preceded by its length, little-endian."""
_UNREACHABLE = 81
"""Exit code of a child that can no longer read questions or write answers."""
_PR_SET_PDEATHSIG = 1

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in ', re.MULTILINE)


@contextmanager
def isolated_imports(*, seconds: float = IMPORT_SECONDS, memory: int | None = None) -> Iterator[None]:
    """Within the context, `ask` imports user modules in a child process; nested contexts share the child.

    A module has `seconds` and `memory`, in bytes: by default half of what is free. The child starts with the first
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


def ask[Result](place: str, question: Callable[..., Result], *arguments: Any, folder: Path | None) -> Result:
    """``question(*arguments, folder)`` about the user's ``module:function`` at `place`.

    Within `isolated_imports` a child process computes the result, so question, arguments and result are pickled.
    ValueError as raised by the question, or because the child ends or takes too long.
    """
    module = place.partition(":")[0]
    if _current is None or module.startswith("dagrl."):
        return question(*arguments, folder)
    return _current.ask(module, folder, question, (*arguments, folder))


class _Imports:
    """The child of a context, started with the first question, and again after a module has ended it."""

    def __init__(self, seconds: float, memory: int | None) -> None:
        self._seconds, self._memory = seconds, memory
        self._child: _Child | None = None
        self._failures: dict[str, str] = {}
        """Module -> why it is not imported again."""

    def ask(self, module: str, folder: Path | None, question: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if module in self._failures:
            raise ValueError(self._failures[module])
        child = self._child = self._child or _Child(_free_bytes() // 2 if self._memory is None else self._memory)
        shared = bool(child.modules - {module})
        child.modules.add(module)
        answer = child.answer((module, folder, question, arguments), self._seconds)
        if answer is not None:
            return _result_of(answer, module)
        timed_out = not child.ended()
        if timed_out:
            child.abort()
        how = f"takes more than {self._seconds:g} s" if timed_out else child.how_it_ended()
        where = child.where(folder)
        self.close()
        if shared and not timed_out:
            # Another module may have left a thread or an alarm that ended the process.
            return self.ask(module, folder, question, arguments)
        remedy = "do such work when the function is called" if timed_out else "remove that from it, or from its imports"
        self._failures[module] = f"importing {module!r} {how}{where}; {remedy}"
        raise ValueError(self._failures[module])

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


_current: _Imports | None = None


class _Child:
    """A forked process that answers questions."""

    def __init__(self, memory: int) -> None:
        incoming, self._requests = os.pipe()
        self._answers, outgoing = os.pipe()
        self._traces = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._status: int | None = None
        self.modules: set[str] = set()
        with warnings.catch_warnings():
            # Libraries that start threads handle forks themselves.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process = os.fork()
        if self._process == 0:
            os.close(self._requests)
            os.close(self._answers)
            _serve(incoming, outgoing, self._traces.fileno(), memory)
        os.close(incoming)
        os.close(outgoing)

    def answer(self, request: tuple[Any, ...], seconds: float) -> bytes | None:
        """The answer to a question; None if the process ends, or gives none in time."""
        begun, announced, data = time.monotonic(), False, bytearray()
        with suppress(BrokenPipeError):
            _write(self._requests, pickle.dumps(request))
        while (waited := time.monotonic() - begun) < seconds:
            # Checked besides the pipe, which a process started by the module may keep open.
            ended = self.ended()
            while select.select([self._answers], [], [], 0 if ended else _POLL_S)[0]:
                piece = os.read(self._answers, 1 << 16)
                data += piece
                length = int.from_bytes(data[:_LENGTH_BYTES], "little")
                if len(data) >= _LENGTH_BYTES + length and len(data) >= _LENGTH_BYTES:
                    return bytes(data[_LENGTH_BYTES:])
                if not piece:
                    time.sleep(_POLL_S)
                    break
            if ended:
                return None
            if waited > _NOTICE_AFTER_S and not announced:
                announced = True
                print(f"dagrl: importing {request[0]}, for at most {seconds:g} s ...", file=sys.stderr, flush=True)
        return None

    def ended(self) -> bool:
        """Whether the process has ended."""
        if self._status is None:
            process, status = os.waitpid(self._process, os.WNOHANG)
            self._status = status if process else None
        return self._status is not None

    def abort(self) -> None:
        """Make a process that hangs write its stack and end."""
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGABRT)
        end = time.monotonic() + _STACK_S
        while not self.ended() and time.monotonic() < end:
            time.sleep(0.01)

    def how_it_ended(self) -> str:
        """The end of the process, as the rest of a sentence about the module."""
        assert self._status is not None, "the process runs"
        code = os.waitstatus_to_exitcode(self._status)
        if code == _UNREACHABLE:
            return "closes file descriptors that it has not opened"
        if code >= 0:
            return f"ends the process with exit code {code}, as os._exit does"
        if -code == signal.SIGKILL:
            return "gets the process killed (SIGKILL), as happens where memory runs out"
        return f"crashes the process ({signal.Signals(-code).name})"

    def where(self, folder: Path | None) -> str:
        """`` at FILE:LINE`` of a crash: the innermost line in the user's folder, else in any file."""
        self._traces.seek(0)
        frames = _FRAME.findall(self._traces.read().decode(errors="replace"))
        frames = [each for each in frames if not each[0].startswith("<") and "importlib" not in each[0]]
        own = [each for each in frames if folder and Path(each[0]).is_relative_to(folder.resolve())]
        return next((f" at {file}:{line}" for file, line in own or frames), "")

    def close(self) -> None:
        """End the process, and those that user modules have started in its session."""
        if not self.ended():
            os.kill(self._process, signal.SIGKILL)
            self._status = os.waitpid(self._process, 0)[1]
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process, signal.SIGKILL)
        os.close(self._requests)
        os.close(self._answers)
        self._traces.close()


def _result_of(answer: bytes, module: str) -> Any:
    try:
        found, result = pickle.loads(answer)  # noqa: S301 - written by our own child
    except Exception as error:
        message = f"the module {module!r} declares its functions with objects of its own; use plain numbers and text"
        raise ValueError(message) from error
    if not found:
        raise ValueError(result)
    return result


def _serve(requests: int, answers: int, traces: int, memory: int) -> NoReturn:
    """In the child: answer questions until the parent closes the pipe. Stacks of crashes go to the file `traces`."""
    code = _UNREACHABLE
    try:
        _cut_off(traces, memory)
        with os.fdopen(requests, "rb") as pipe, suppress(EOFError):
            while True:
                data = _answer(*pickle.load(pipe))  # noqa: S301 - written by our own parent
                _write(answers, len(data).to_bytes(_LENGTH_BYTES, "little") + data)
        code = 0
    finally:
        # atexit handlers and threads of user modules must not keep the process alive.
        os._exit(code)


def _cut_off(traces: int, memory: int) -> None:
    """Keep user modules from the terminal and the parent's output; end with the parent."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # If memory runs out all the same, the kernel ends this process first.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    sys.stdin, sys.stdout, sys.stderr = (
        open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - open until the process ends
        for descriptor, mode in enumerate("rww")
    )
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    # enable() would keep handlers that a library has replaced since.
    faulthandler.disable()
    faulthandler.enable(traces, all_threads=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = _proc_bytes("/proc/self/status", "VmData:", 0) + memory
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _answer(module: str, folder: Path | None, question: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """A pickled pair: whether the question has a result, and the result or the reason why it has none."""
    try:
        return pickle.dumps((True, question(*arguments)))
    except ValueError as error:
        return pickle.dumps((False, str(error)))
    except BaseException as error:  # noqa: BLE001 - user modules may raise anything
        return pickle.dumps((False, import_failure(module, error, folder)))


def _free_bytes() -> int:
    """Memory that the machine has left."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _proc_bytes("/proc/meminfo", "MemAvailable:", total)


def _proc_bytes(file: str, field: str, default: int) -> int:
    try:
        lines = Path(file).read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
    except (OSError, StopIteration):
        return default


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
