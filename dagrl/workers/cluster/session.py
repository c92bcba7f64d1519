"""What a Ray of our own needs on a machine: a folder for its files, and somebody who cleans up after it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dagrl.workers.cluster import reaper

RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Workers on CPU slots, and the host, must not see the GPUs of their machine.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    # What workers return of more bytes goes into the object store, and not through the driver's memory to whoever wants
    # it: Ray's own bound lets most columns through.
    "RAY_max_direct_call_object_size": "8192",
    # Each of Ray's processes logs its internal counters each minute, 115 MB a day in all: each hour is enough. Not -1,
    # with which the control store prints them without a pause.
    "RAY_event_stats_print_interval_ms": "3600000",
}
"""What Ray's processes find in their environment, if nothing else is said there."""
_OBJECT_STORE_BYTES = 2 * 2**30
_LONGEST_TEMPORARY_FOLDER = 25
_SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def session_folder() -> Iterator[Path]:
    """A folder for Ray's files and for the temporary files of all workers, removed in the end.

    Workers are killed when a run is over, so they cannot clean up after themselves.
    """
    # Ray puts sockets some 65 characters below it, and a socket's path must stay under 108 bytes.
    roomy = len(tempfile.gettempdir()) <= _LONGEST_TEMPORARY_FOLDER
    folder = Path(tempfile.mkdtemp(prefix="dagrl-", dir=None if roomy else "/tmp"))
    outer = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield folder
    finally:
        if outer is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = outer
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def watched(folder: Path, epitaph: str) -> Iterator[Callable[[], None]]:
    """Have a reaper clean up if this process is killed, and say so with `epitaph`.

    Yields a function that tells it of all processes there are.
    Where this process lives, it ends them itself with the context. Children that it had before are none of Ray's.
    """
    others = set(reaper.descendants(os.getpid()))
    watcher = subprocess.Popen(
        [sys.executable, "-I", reaper.__file__, epitaph], stdin=subprocess.PIPE, text=True, start_new_session=True
    )
    others.add(watcher.pid)
    assert watcher.stdin is not None
    tell = watcher.stdin
    known: list[str] = []

    def watch() -> None:
        there = [reaper.identity(pid) for pid in reaper.descendants(os.getpid()) if pid not in others]
        known.extend(each for each in there if each is not None)
        with contextlib.suppress(BrokenPipeError):  # somebody has ended it, and this process still cleans up
            tell.write("".join(f"{each}\n" for each in known))
            tell.flush()

    tell.write(f"{folder}\n")
    tell.flush()
    try:
        yield watch
    finally:
        # Ray may have started more since then; workers that it is starting name the folder on their command line.
        reaper.end([*known, *reaper.started_with(str(folder))])
        with contextlib.suppress(BrokenPipeError):  # somebody has ended it
            tell.write(f"{reaper.CLEAN}\n")
            tell.close()
        watcher.wait(timeout=10)


@contextmanager
def fewer_processes() -> Iterator[None]:
    """Within the context `ray.init` starts a Ray without autoscaler and log monitor, of which a run has no use.

    A second of CPU time, and more as a run goes on. `ray start` has switches for them, `ray.init` hands none through.
    """
    from ray._private import parameter

    whole = parameter.RayParams
    parameter.RayParams = partial(whole, no_monitor=True, include_log_monitor=False)
    try:
        yield
    finally:
        parameter.RayParams = whole


def object_store_bytes() -> int:
    """A store that fits: Ray would take 30% of the memory, and warns where shared memory is small."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(128 * 2**20, min(_OBJECT_STORE_BYTES, memory // 10))


def small_shared_memory() -> str:
    """Where shared memory is too small for the store, so that Ray has it on the disk: what to tell of it."""
    with contextlib.suppress(OSError):
        free, wanted = shutil.disk_usage(_SHARED_MEMORY).free, object_store_bytes()
        if free < wanted:
            return (
                f"{_SHARED_MEMORY} has {free / 2**30:.1f} GiB free, and Ray's object store takes {wanted / 2**30:.1f}: "
                "it lies on the disk, which is slow; with Docker say --shm-size=16g or --ipc=host"
            )
    return ""


def keep_worker_logs(folder: Path, logs: Path, prefix: str = "") -> None:
    """Keep what the workers printed, where they printed something; a full disk must not hide why a run has failed.

    `prefix` comes before the names of files.
    """
    with contextlib.suppress(OSError):
        for file in folder.glob("session_*/logs/worker-*"):
            lines = file.read_text(errors="replace").splitlines() if file.is_file() and not file.is_symlink() else []
            printed = [line for line in lines if not line.startswith((":job_id:", ":actor_name:"))]
            if printed:
                logs.mkdir(parents=True, exist_ok=True)
                (logs / f"{prefix}{file.name}").write_text("\n".join(printed) + "\n")
