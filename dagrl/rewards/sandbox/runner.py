"""`run`: Python code in a process that can compute, read its input, write its output, and little else.

The code is taken for hostile, which what a policy writes under a reward is, sooner or later. The process has no network
and no children, sees no environment and no files but Python's own and those of an empty folder, and is bounded in time,
memory, output and threads. The kernel holds that (seccomp, Landlock, resource limits), not Python.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from dagrl.rewards.sandbox.launcher import READY
from dagrl.rewards.sandbox.syscalls import filter_program

MAX_THREADS = 32
MAX_FILES = 256
LEAST_MEMORY_MIB = 64
"""Python itself needs some."""
_MIB = 1 << 20
_BLOCK_BYTES = 512
"""Unit of `os.stat_result.st_blocks`."""
_LOOK_EVERY_S = 0.05
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Errors of /proc for a process that ends meanwhile; the last of these to users other than root."""
_START_TIMEOUT_S = 60.0
_LAUNCHER = Path(__file__).with_name("launcher.py")
_SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/ld.so.conf")
_TIME_ZONES = ("/usr/share/zoneinfo", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class Outcome(Enum):
    """How a process ended."""

    FINISHED = "finished"
    """By itself, with exit status 0."""
    FAILED = "failed"
    """By itself with another one, or by a signal: an uncaught exception, too little memory, a crash."""
    TIMED_OUT = "timed out"
    TOO_MUCH = "wrote too much, or started too many threads"


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a run."""

    outcome: Outcome
    exit_status: int
    """0, what the code exited with, or minus the signal that ended it."""
    stdout: str
    stderr: str

    @property
    def finished(self) -> bool:
        """Whether it came to its end without an error."""
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
) -> Result:
    """Run `code` as a program of its own, with the Python and the packages that this process has.

    `files` (name -> text) lie in its working folder, which is empty otherwise and gone afterwards. `timeout_s` bounds
    the time from the start of the program, on the clock; `memory_mib` its address space; `file_mib` each of standard
    output, standard error and its files together. Whatever the code does ends in a result. May be called from any
    thread.

    What it writes is the same in each run, as far as that is the code's affair: sets have one order, and the folder's
    name, another one each time, is left out of the outputs.

    Without `hide_files`, for kernels that have no Landlock, the code can read whatever the user can, and write no file
    at all, its own folder's included. Raises OSError with a sentence where this machine cannot confine a process, and
    ValueError for a limit that is not above 0 or a file's name that is a path.
    """
    _check_limits(timeout_s=timeout_s, memory_mib=memory_mib, file_mib=file_mib)
    with TemporaryDirectory(prefix="dagrl-sandbox-") as made:
        outside = Path(made).resolve()
        folder = outside / "work"
        folder.mkdir()
        for name, text in {**(files or {}), "main.py": code}.items():
            if Path(name).name != name:
                raise ValueError(f"a file of the sandbox has a name, not a path: {name!r}")
            _write(folder / name, text)
        _write(outside / "stdin", stdin)
        limits = _limits(timeout_s, memory_mib, file_mib)
        with _started(outside, folder, limits, hide_files) as process:
            stopped = _watch(process, folder, timeout_s, file_mib * _MIB)
        outputs = [(outside / name).read_bytes() for name in ("stdout", "stderr")]
        outcome = stopped or _outcome(process.returncode, any(len(each) >= file_mib * _MIB for each in outputs))
        return Result(outcome, process.returncode, *(_told(each, folder) for each in outputs))


def _told(output: bytes, folder: Path) -> str:
    """The output of the program, the same in each run: the folder's name is another one each time."""
    return output.decode("utf-8", "replace").replace(f"{folder}/", "").replace(str(folder), ".")


def _write(path: Path, text: str) -> None:
    """Lone surrogates, which a model's text may have, are no reason to fail."""
    path.write_bytes(text.encode("utf-8", "replace"))


def _check_limits(**limits: float) -> None:
    for name, value in limits.items():
        if not value > 0:
            raise ValueError(f"{name} of the sandbox must be above 0, not {value}")
    if limits["memory_mib"] < LEAST_MEMORY_MIB:
        raise ValueError(f"memory_mib of the sandbox must be {LEAST_MEMORY_MIB} at least, not {limits['memory_mib']}")


def _limits(timeout_s: float, memory_mib: int, file_mib: int) -> dict[str, int]:
    """By their names in `resource`."""
    return {
        "RLIMIT_CPU": int(timeout_s) + 2,  # Where this process dies before it can end the other.
        "RLIMIT_AS": memory_mib * _MIB,
        "RLIMIT_FSIZE": file_mib * _MIB,
        "RLIMIT_NOFILE": 64,
        # 0 would still start the program that a machine may have for collecting dumps; 1 is the kernel's word for none.
        "RLIMIT_CORE": 1,
        "RLIMIT_STACK": min(8 * _MIB, memory_mib * _MIB),
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_MEMLOCK": 0,
    }


@contextmanager
def _started(
    outside: Path, folder: Path, limits: Mapping[str, int], hide_files: bool
) -> Iterator[subprocess.Popen[bytes]]:
    """The confined process, which has ended when the context has."""
    status, status_fd = os.pipe()
    try:
        order = {
            "status_fd": status_fd,
            "parent": os.getpid(),
            "limits": limits,
            "readable": _readable() if hide_files else None,
            "writable": [str(folder), "/dev/null"],
            "filter": filter_program(platform.machine(), write_files=hide_files).hex(),
            # Nothing of the user's is imported, and there is no other environment than this.
            "command": [sys.executable, "-P", "-s", "-B", "-X", "utf8", "main.py"],
            "environment": {
                "PATH": "",
                "HOME": str(folder),
                "TMPDIR": str(folder),
                "LANG": "C.UTF-8",
                # The same order of sets in each run.
                "PYTHONHASHSEED": "0",
                # Else numpy's threads alone take the memory up.
                "OPENBLAS_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
            },
        }
        command = [sys.executable, "-I", "-S", "-B", str(_LAUNCHER), json.dumps(order)]
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
            # It has no children: with it, everything is gone.
            process.kill()
            process.wait()
    finally:
        os.close(status)
        if status_fd >= 0:
            os.close(status_fd)


def _wait_for_walls(status: int) -> None:
    """Return when the code begins: the launcher's end of the pipe closes then. OSError with what it says instead."""
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


def _watch(process: subprocess.Popen[bytes], folder: Path, timeout_s: float, most_bytes: int) -> Outcome | None:
    """Wait for the end of the process. What it has overstepped, if it must be ended."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return Outcome.TIMED_OUT
        try:
            process.wait(min(left, _LOOK_EVERY_S))
        except subprocess.TimeoutExpired:
            if _threads(process.pid) > MAX_THREADS or _holds_too_much(process.pid, folder, most_bytes):
                return Outcome.TOO_MUCH
        else:
            return None


def _threads(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}/task").stat().st_nlink - 2
    except _GONE:
        return 0


def _holds_too_much(pid: int, folder: Path, most_bytes: int) -> bool:
    """Whether there is more in the folder than there may be, with files that are removed and open or mapped still.

    It has no folders in it, and no links: the process can make neither. The size of a file that is removed, closed and
    only mapped cannot be seen from here, and no program needs one.
    """
    task = _running_task(pid)
    mapped = _removed_and_mapped(task, folder)
    shown, removed = [*_stats(folder)], [each for each in _stats(task / "fd") if each.st_nlink == 0]
    sizes = {(each.st_dev, each.st_ino): each.st_blocks * _BLOCK_BYTES for each in (*shown, *removed)}
    hidden = mapped - {each.st_ino for each in removed}
    return bool(hidden) or max(len(shown), len(sizes)) > MAX_FILES or sum(sizes.values()) > most_bytes


def _running_task(pid: int) -> Path:
    """In /proc, a thread of the process: all have the same files, and the first one may end before the others."""
    with suppress(*_GONE), os.scandir(f"/proc/{pid}/task") as tasks:
        for task in tasks:
            with suppress(*_GONE):
                if os.listdir(f"{task.path}/fd"):  # noqa: PTH208 - of /proc, and often
                    return Path(task)
    return Path(f"/proc/{pid}")


def _removed_and_mapped(task: Path, folder: Path) -> set[int]:
    """The inodes of files of the folder that are removed and in the task's memory."""
    try:
        lines = (task / "maps").read_text(errors="replace").splitlines()
    except _GONE:
        return set()
    # Address, rights, offset, device, inode, path.
    return {int(line.split(None, 5)[4]) for line in lines if f" {folder}/" in line and line.endswith(" (deleted)")}


def _stats(folder: Path) -> Iterator[os.stat_result]:
    """Bytes in a folder at this moment, links followed; a little more than it may hold at most."""
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
def _readable() -> list[str]:
    """Paths that Python needs: itself, its packages, the system's libraries."""
    paths = sysconfig.get_paths()
    own = [
        *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *(sys.executable, os.path.realpath(sys.executable), f"{sys.prefix}/pyvenv.cfg"),
        *(f"{prefix}/{folder}" for prefix in (sys.prefix, sys.base_prefix) for folder in ("lib", "lib64")),
    ]
    return sorted({*own, *_SYSTEM, *_TIME_ZONES, *_DEVICES})
