"""Bounds what reading a file may take: a script may loop forever, double a text in a loop, or source itself.

The work runs in a forked child process with limits on its time and memory. So neither the shell's statements nor the
values of YAML need limits of their own.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from dagrl.importing.settings import ImportProblem
from dagrl.plugins.isolation import cut_off

CPU_SECONDS, SECONDS = 2, 4
"""Limits of a process's CPU time, and of the wait. Scripts of the frameworks take less than 0.2 s."""
MEMORY = 192 << 20
"""Bytes beside those of the caller. The scripts take less than 20 MiB."""
_MOST_RESULT = 1 << 20
_FORK = multiprocessing.get_context("fork")


def bounded[Result](work: Callable[[], Result], path: Path) -> Result:
    """The result of `work`, which reads the file `path`, from a child process.

    ImportProblem if the work raises an exception or exceeds a limit. The result is pickled.
    """
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_serve, args=(sender, work, path))
    with warnings.catch_warnings():
        # Libraries that start threads handle forks themselves.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    answer = b""
    try:
        # A child that a limit ends leaves the pipe without an answer, or with a part of one.
        with suppress(EOFError, OSError):
            answer = receiver.recv_bytes(_MOST_RESULT) if receiver.poll(SECONDS) else b""
    finally:
        process.kill()
        process.join()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # The parser of shell scripts.
        receiver.close()
    if not answer:
        limits = f"{CPU_SECONDS} s or {MEMORY >> 20} MiB"
        raise ImportProblem(f"{path}: reading it takes more than {limits}; shorten its loops and values")
    found, result = pickle.loads(answer)  # noqa: S301 - written by our own child
    if not found:
        raise ImportProblem(result)
    return result


def _serve(sender: Connection, work: Callable[[], Any], path: Path) -> NoReturn:
    """In the child: send whether the work has a result, and the result or the reason why it has none."""
    try:
        cut_off(MEMORY)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        with suppress(MemoryError):
            sender.send_bytes(pickle.dumps(_answer(work, path)))
    finally:
        os._exit(0)


def _answer(work: Callable[[], Any], path: Path) -> tuple[bool, Any]:
    try:
        return True, work()
    except MemoryError:
        raise
    except ImportProblem as error:
        return False, str(error)
    except RecursionError:
        return False, f"{path}: is nested too deeply, or calls, sources or names itself"
    except Exception as error:  # noqa: BLE001 - a file may contain anything
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return False, f"{path}: cannot be translated, by a fault of dagrl ({why}); please report it"
