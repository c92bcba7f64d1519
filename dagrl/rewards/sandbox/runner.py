"""`run`: runs Python code in a process that can compute, read its input, write its output, and little else.

`run_bash` does the same for a bash script, which may start subshells, but no programs.

The sandbox treats the code as hostile, because a policy that optimizes a reward eventually exploits it. The process has
no network, no child processes and no inherited environment. It sees only Python's own files and an initially empty
folder. Its time, memory, output and threads are limited. The kernel enforces most of this with seccomp, Landlock and
resource limits; the parent process checks the number of threads, the size of the folder and the elapsed time.
"""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dagrl.rewards.sandbox.launcher import READY
from dagrl.rewards.sandbox.syscalls import filter_program

MAX_THREADS = 32
MAX_FILES = 256
MAX_SUBSHELLS = 16
LEAST_MEMORY_MIB = 64
"""The lowest limit: Python itself needs memory."""
_MIB = 1 << 20
_BLOCK_BYTES = 512
"""Unit of `os.stat_result.st_blocks`."""
_LOOK_EVERY_S = 0.05
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Errors that /proc raises for a process that has just ended; users other than root get PermissionError."""
_START_TIMEOUT_S = 60.0
_LAUNCHER = Path(__file__).with_name("launcher.py")
SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/ld.so.conf")
_TIME_ZONES = ("/usr/share/zoneinfo", "/etc/localtime")
_PYTHON_ENVIRONMENT = {
    "PATH": "",
    "LANG": "C.UTF-8",
    # Sets have the same order in each run.
    "PYTHONHASHSEED": "0",
    # Otherwise, numpy's threads alone use up the memory.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class Outcome(Enum):
    """How a process ended."""

    FINISHED = "finished"
    """The process exited with status 0."""
    FAILED = "failed"
    """The process exited with another status or died from a signal: an uncaught exception, no memory, a crash."""
    TIMED_OUT = "timed out"
    TOO_MUCH = "wrote too much, or started too many threads or subshells"


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a run."""

    outcome: Outcome
    exit_status: int
    """The exit status of the process, or the negative number of the signal that ended it."""
    stdout: str
    stderr: str
    kept: str | None = None
    """Text of the file to keep; None if there is none."""

    @property
    def finished(self) -> bool:
        """Whether the process ended without an error."""
        return self.outcome is Outcome.FINISHED


def run(
    code: str,
    *,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
    memory_mib: int = 1024,
    file_mib: int = 16,
    hide_files: bool = True,
    connects_to: int | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    kept: str | None = None,
) -> Result:
    """Run `code` as a separate program, with the Python and the packages of this process.

    `files` (name -> text) are written to its working folder, which is otherwise empty and is removed afterwards.
    `timeout_s` limits the wall-clock time from the start of the program and `memory_mib` its address space. `file_mib`
    limits standard output, standard error and the total of its files, each separately. Failures of the code are
    returned as a result. May be called from any thread.

    Deterministic code gives the same output in each run: the hash seed is fixed, and the path of the folder, which is
    different each time, is removed from the outputs.

    With `connects_to`, the program can open TCP connections to that port. It gets `arguments`, and `environment` in
    addition to a fixed one. The result has the text of its file `kept`, if it has written one.

    Without `hide_files`, for kernels without Landlock, the code can read every file that the user can read, and cannot
    write any file, not even in its own folder. Raises OSError with an explanation if this machine cannot confine a
    process, and ValueError for a limit that is not above 0 or a file name that is a path.
    """
    _check_limits(timeout_s=timeout_s, memory_mib=memory_mib, file_mib=file_mib)

    def order(folder: Path) -> dict[str, Any]:
        return {
            "limits": _limits(timeout_s, memory_mib, file_mib),
            "readable": python_paths() if hide_files else None,
            "writable": [str(folder), "/dev/null"],
            "port": connects_to,
            "forks": False,
            "filter": filter_program(platform.machine(), write_files=hide_files, connects=connects_to is not None),
            # The program imports no user packages, and gets only this environment.
            "command": [sys.executable, "-P", "-s", "-B", "-X", "utf8", "main.py", *arguments],
            "environment": {**_PYTHON_ENVIRONMENT, "HOME": str(folder), "TMPDIR": str(folder), **(environment or {})},
        }

    return _run(order, {**(files or {}), "main.py": code}, stdin, timeout_s, file_mib, kept)


def run_bash(
    code: str,
    *,
    visible: Sequence[str],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    timeout_s: float = 10.0,
    memory_mib: int = 256,
    file_mib: int = 16,
) -> Result:
    """Run `code` by bash: its builtins, functions and subshells. It can start no program and write no file.

    It can read the files and folders `visible`. `arguments` are ``$0``, ``$1`` and so on. The limits are those of
    `run`; each subshell has the memory. Raises OSError if there is no bash, or if the machine cannot confine it.
    """
    _check_limits(timeout_s=timeout_s, memory_mib=memory_mib, file_mib=file_mib)
    bash = shutil.which("bash")
    if bash is None:
        raise OSError("there is no bash on this machine")
    order = {
        "limits": _limits(timeout_s, memory_mib, file_mib),
        "readable": [bash, os.path.realpath(bash), *SYSTEM, "/dev/null"],
        "visible": [*visible],
        "writable": ["/dev/null"],
        "port": None,
        "forks": True,
        "filter": filter_program(platform.machine(), write_files=True, forks=True),
        "command": [bash, "--norc", "--noprofile", "-c", code, *arguments],
        "environment": {"LANG": "C.UTF-8", **environment},
    }
    return _run(lambda _: order, {}, "", timeout_s, file_mib, None)


def _run(
    order_in: Callable[[Path], dict[str, Any]],
    files: Mapping[str, str],
    stdin: str,
    timeout_s: float,
    file_mib: int,
    kept: str | None,
) -> Result:
    """Run the command of an order, which depends on the folder, in a folder with these files."""
    with TemporaryDirectory(prefix="dagrl-sandbox-") as made:
        outside = Path(made).resolve()
        folder = outside / "work"
        folder.mkdir()
        for name, text in files.items():
            if Path(name).name != name:
                raise ValueError(f"a file of the sandbox has a name, not a path: {name!r}")
            _write(folder / name, text)
        _write(outside / "stdin", stdin)
        order = order_in(folder)
        with _started(outside, folder, {**order, "filter": order["filter"].hex(), "parent": os.getpid()}) as process:
            stopped = _watch(process, folder, timeout_s, file_mib * _MIB, forks=order["forks"])
        outputs = [(outside / name).read_bytes() for name in ("stdout", "stderr")]
        stdout, stderr = (_told(output, folder) for output in outputs)
        outcome = stopped or _outcome(process.returncode, any(len(output) >= file_mib * _MIB for output in outputs))
        file = _told((folder / kept).read_bytes(), folder) if kept and (folder / kept).is_file() else None
        return Result(outcome, process.returncode, stdout, stderr, file)


def _told(output: bytes, folder: Path) -> str:
    """The output of the program without the path of the folder, which is different in each run."""
    return output.decode("utf-8", "replace").replace(f"{folder}/", "").replace(str(folder), ".")


def _write(path: Path, text: str) -> None:
    """Write text as UTF-8. Replaces lone surrogates, which a model's text may contain."""
    path.write_bytes(text.encode("utf-8", "replace"))


def _check_limits(**limits: float) -> None:
    for name, value in limits.items():
        if not value > 0:
            raise ValueError(f"{name} of the sandbox must be above 0, not {value}")
    if limits["memory_mib"] < LEAST_MEMORY_MIB:
        raise ValueError(f"memory_mib of the sandbox must be {LEAST_MEMORY_MIB} at least, not {limits['memory_mib']}")


def _limits(timeout_s: float, memory_mib: int, file_mib: int) -> dict[str, int]:
    return {
        "RLIMIT_CPU": int(timeout_s) + 2,  # In case this process dies before it can stop the other.
        "RLIMIT_AS": memory_mib * _MIB,
        "RLIMIT_FSIZE": file_mib * _MIB,
        "RLIMIT_NOFILE": 64,
        # With 0, the kernel still starts a program that collects core dumps; 1 disables that too.
        "RLIMIT_CORE": 1,
        "RLIMIT_STACK": min(8 * _MIB, memory_mib * _MIB),
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_MEMLOCK": 0,
    }


@contextmanager
def _started(outside: Path, folder: Path, order: Mapping[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the confined process; it is killed when the context exits."""
    status, status_fd = os.pipe()
    try:
        argument = json.dumps({**order, "status_fd": status_fd})
        command = [sys.executable, "-I", "-S", "-B", str(_LAUNCHER), argument]
        with (
            (outside / "stdin").open("rb") as stdin,
            (outside / "stdout").open("wb") as stdout,
            (outside / "stderr").open("wb") as stderr,
        ):
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=folder,
                env={},
                pass_fds=(status_fd,),
                start_new_session=True,
            )
        os.close(status_fd)
        status_fd = -1
        try:
            _wait_for_walls(status)
            yield process
        finally:
            # Only bash has children, and they cannot leave the group of their process: this stops everything.
            if order["forks"]:
                with suppress(*_GONE):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
    finally:
        os.close(status)
        if status_fd >= 0:
            os.close(status_fd)


def _wait_for_walls(status: int) -> None:
    """Wait until the launcher closes its end of the pipe and the code starts. Raises OSError with its error message."""
    deadline, said = time.monotonic() + _START_TIMEOUT_S, b""
    while True:
        ready, _, _ = select.select([status], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            raise OSError(f"the sandbox's process has not started in {_START_TIMEOUT_S:.0f} s")
        more = os.read(status, 4096)
        if not more:
            break
        said += more
    if said != READY:
        what = said.removeprefix(READY).decode() or "its process ended before the code began"
        raise OSError(f"code cannot be confined on this machine: {what}")


def _watch(
    process: subprocess.Popen[bytes], folder: Path, timeout_s: float, most_bytes: int, *, forks: bool
) -> Outcome | None:
    """Wait for the process to end. Returns the limit that it exceeds if it must be stopped, else None."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return Outcome.TIMED_OUT
        try:
            process.wait(min(left, _LOOK_EVERY_S))
        except subprocess.TimeoutExpired:
            if (
                _threads(process.pid) > MAX_THREADS
                or (forks and _subshells(process.pid) > MAX_SUBSHELLS)
                or _holds_too_much(process.pid, folder, most_bytes)
            ):
                return Outcome.TOO_MUCH
        else:
            return None


def _threads(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}/task").stat().st_nlink - 2
    except _GONE:
        return 0


def _subshells(group: int) -> int:
    count = -1
    for pid in os.listdir("/proc"):  # noqa: PTH208 - often
        with suppress(*_GONE, ValueError):
            count += os.getpgid(int(pid)) == group
    return count


def _holds_too_much(pid: int, folder: Path, most_bytes: int) -> bool:
    """Whether the folder holds too much, including removed files that are still open or mapped.

    The folder contains no folders and no links, because the process cannot create them. The size of a file that is
    removed, closed and still mapped is unknown here; such a file counts as too much, because no program needs one.
    """
    task = _running_task(pid)
    mapped = _removed_and_mapped(task, folder)
    shown, removed = [*_stats(folder)], [stat for stat in _stats(task / "fd") if stat.st_nlink == 0]
    sizes = {(stat.st_dev, stat.st_ino): stat.st_blocks * _BLOCK_BYTES for stat in (*shown, *removed)}
    hidden = mapped - {stat.st_ino for stat in removed}
    return bool(hidden) or max(len(shown), len(sizes)) > MAX_FILES or sum(sizes.values()) > most_bytes


def _running_task(pid: int) -> Path:
    """The /proc folder of a running thread. All threads share their files; the first may end before the others."""
    with suppress(*_GONE), os.scandir(f"/proc/{pid}/task") as tasks:
        for task in tasks:
            with suppress(*_GONE):
                if os.listdir(f"{task.path}/fd"):  # noqa: PTH208 - of /proc, and often
                    return Path(task)
    return Path(f"/proc/{pid}")


def _removed_and_mapped(task: Path, folder: Path) -> set[int]:
    try:
        lines = (task / "maps").read_text(errors="replace").splitlines()
    except _GONE:
        return set()
    # Address, rights, offset, device, inode, path.
    return {int(line.split(None, 5)[4]) for line in lines if f" {folder}/" in line and line.endswith(" (deleted)")}


def _stats(folder: Path) -> Iterator[os.stat_result]:
    """The stat results of the entries in a folder, links followed; at most one more than `MAX_FILES`."""
    with suppress(*_GONE), os.scandir(folder) as entries:
        for entry in islice(entries, MAX_FILES + 1):
            with suppress(*_GONE):
                yield Path(entry).stat()


def _outcome(exit_status: int, output_is_full: bool) -> Outcome:
    if exit_status == 0:
        return Outcome.FINISHED
    if output_is_full or exit_status == -signal.SIGXFSZ:
        return Outcome.TOO_MUCH
    return Outcome.TIMED_OUT if exit_status == -signal.SIGXCPU else Outcome.FAILED


@cache
def python_paths() -> list[str]:
    """Paths that Python needs: itself, its packages, the system's libraries."""
    paths = sysconfig.get_paths()
    own = [
        *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *(sys.executable, os.path.realpath(sys.executable), f"{sys.prefix}/pyvenv.cfg"),
        *(f"{prefix}/{folder}" for prefix in (sys.prefix, sys.base_prefix) for folder in ("lib", "lib64")),
    ]
    return sorted({*own, *SYSTEM, *_TIME_ZONES, *_DEVICES})
