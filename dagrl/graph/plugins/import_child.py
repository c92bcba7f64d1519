"""The child process that imports user modules: what it is cut off from, and how it answers.

The parent forks it, so that it starts within milliseconds; `dagrl.graph.plugins.isolation` is the parent's side.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dagrl.graph.plugins.custom import import_failure

LENGTH_BYTES = 8
"""Before each message: its length, little-endian."""

UNREACHABLE = 81
"""Exit code of a child that cannot read questions or write answers any more."""

_PR_SET_PDEATHSIG = 1


def serve(requests: int, answers: int, traces: int, memory: int | None) -> None:
    """Answer questions from one pipe on another until the first ends. `traces`: a file for the stacks of crashes.

    `memory` bounds what the process may allocate from now on, in bytes. Never returns.
    """
    code = UNREACHABLE
    try:
        _cut_off(traces, memory)
        while (request := _read(requests)) is not None:
            data = _answer(request)
            _write(answers, len(data).to_bytes(LENGTH_BYTES, "little") + data)
        code = 0
    finally:
        # Neither atexit handlers nor threads of user modules keep the process.
        os._exit(code)


def _cut_off(traces: int, memory: int | None) -> None:
    """Keep the terminal, the output and the parent's life from what user modules do."""
    os.setsid()
    _die_with_parent()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    sys.stdin, sys.stdout, sys.stderr = (
        open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process lives
        for descriptor, mode in enumerate("rww")
    )
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    # Where it is enabled already, enable() would keep handlers that a library has replaced since.
    faulthandler.disable()
    faulthandler.enable(traces, all_threads=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = _data_bytes() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _die_with_parent() -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # Should memory run out all the same, the kernel ends this process first.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _data_bytes() -> int:
    """The memory that the process has allocated already, as RLIMIT_DATA counts it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024
    except (OSError, StopIteration):
        return 0


def _answer(request: bytes) -> bytes:
    """Whether a question has a result, and that, or the sentence that says why it has none; pickled."""
    module, folder, question, arguments = pickle.loads(request)  # noqa: S301 - of our own parent
    outcome = _outcome(module, folder, question, arguments)
    try:
        return pickle.dumps(outcome)
    except Exception as error:  # noqa: BLE001 - what a user's objects raise
        return pickle.dumps((False, import_failure(module, error, folder)))


def _outcome(module: str, folder: Any, question: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, question(*arguments)
    except ValueError as error:
        return False, str(error)
    except BaseException as error:  # noqa: BLE001 - user modules may raise anything
        return False, import_failure(module, error, folder)


def _read(descriptor: int) -> bytes | None:
    """The next message; None at the end."""
    length = _exactly(descriptor, LENGTH_BYTES)
    return None if length is None else _exactly(descriptor, int.from_bytes(length, "little"))


def _exactly(descriptor: int, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        piece = os.read(descriptor, count - len(data))
        if not piece:
            return None
        data += piece
    return data


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
