"""Ray for the length of a run: joins the cluster that is there, or starts a small one on this machine and ends it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from dagrl.plan.machines import MisfitError, assign_machines
from dagrl.runtime import reaper
from dagrl.runtime.errors import RunError
from dagrl.runtime.ray_machines import machines_of
from dagrl.spec.schema import Pipeline

_OBJECT_STORE_BYTES = 2 * 2**30
_KNOCK_TIMEOUT_S = 10.0
_LONGEST_TEMPORARY_FOLDER = 25
_RUNNING_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Where `ray start` writes the address of the cluster on this machine."""


@contextmanager
def cluster(pipeline: Pipeline, logs: Path) -> Iterator[ModuleType]:
    """The `ray` module, connected; RunError where the pipeline asks for more than there is.

    The cluster is the one at RAY_ADDRESS, or else the one that `ray start` has started on this machine, or else one
    that is started here. The last is ended with the context, its processes and files with it; what its workers have
    printed is kept in `logs`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Workers on CPU slots, and the host, must not see the GPUs of their machine.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    import ray

    address = os.environ.get("RAY_ADDRESS") or ("auto" if _RUNNING_CLUSTER.exists() else None)
    with _joined(ray, address) if address else _started(ray, pipeline, logs):
        _check_resources(ray, pipeline)
        yield ray


@contextmanager
def _joined(ray: ModuleType, address: str) -> Iterator[None]:
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="dagrl")
    except (OSError, ValueError) as error:
        raise RunError(
            f"no Ray cluster answers at {address}: {error}",
            hint="if it asks for a token, set RAY_AUTH_MODE=token; for a local one, unset RAY_ADDRESS and, if a "
            f"cluster has died, remove {_RUNNING_CLUSTER}",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """OSError within seconds where nobody listens at ``host:port``: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_KNOCK_TIMEOUT_S).close()


@contextmanager
def _started(ray: ModuleType, pipeline: Pipeline, logs: Path) -> Iterator[None]:
    slots = sum(group.ranks for group in pipeline.groups.values() if group.is_cpu)
    with _session_folder() as folder, _watched(folder) as watch:
        try:
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, slots),
                include_dashboard=False,
                object_store_memory=_object_store_bytes(),
                _temp_dir=str(folder),
                log_to_driver=False,
                logging_level="ERROR",
                namespace="dagrl",
            )
            watch()
            yield
        finally:
            # From here on everything has a bound, and half of it would leave processes behind.
            interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
            watch()
            ray.shutdown()
            _keep_worker_logs(folder, logs)
            signal.signal(signal.SIGINT, interrupt)


@contextmanager
def _session_folder() -> Iterator[Path]:
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
def _watched(folder: Path) -> Iterator[Callable[[], None]]:
    """Have a reaper clean up if this process is killed. Yields a function that tells it of all processes there are.

    Where this process lives, it ends them itself with the context. Children that it had before are none of Ray's.
    """
    others = set(reaper.descendants(os.getpid()))
    watcher = subprocess.Popen(
        [sys.executable, "-I", reaper.__file__], stdin=subprocess.PIPE, text=True, start_new_session=True
    )
    others.add(watcher.pid)
    assert watcher.stdin is not None
    tell = watcher.stdin
    known: list[str] = []

    def watch() -> None:
        there = [reaper.identity(pid) for pid in reaper.descendants(os.getpid()) if pid not in others]
        known.extend(each for each in there if each is not None)
        tell.write("".join(f"{each}\n" for each in known))
        tell.flush()

    tell.write(f"{folder}\n")
    tell.flush()
    try:
        yield watch
    finally:
        reaper.end(known)
        tell.write(f"{reaper.CLEAN}\n")
        tell.close()
        watcher.wait(timeout=10)


def _object_store_bytes() -> int:
    """A store that fits: Ray would take 30% of the memory, and warns where shared memory is small."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(128 * 2**20, min(_OBJECT_STORE_BYTES, memory // 10))


def _keep_worker_logs(folder: Path, logs: Path) -> None:
    """Keep what the workers printed, where they printed something; a full disk must not hide why a run has failed."""
    with contextlib.suppress(OSError):
        for file in folder.glob("session_*/logs/worker-*"):
            lines = file.read_text(errors="replace").splitlines() if file.is_file() and not file.is_symlink() else []
            printed = [line for line in lines if not line.startswith((":job_id:", ":actor_name:"))]
            if printed:
                logs.mkdir(parents=True, exist_ok=True)
                (logs / file.name).write_text("\n".join(printed) + "\n")


def _check_resources(ray: ModuleType, pipeline: Pipeline) -> None:
    try:
        assign_machines(pipeline.groups, machines_of(ray))
    except MisfitError as error:
        raise RunError(
            str(error),
            hint="make the groups smaller, or run where there is more; `dagrl launch` starts several machines",
        ) from error
