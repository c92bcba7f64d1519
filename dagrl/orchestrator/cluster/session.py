"""Resources of a Ray cluster that a run starts: a folder for its files, and a process that cleans up after it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from dagrl.log_ends import ends_of
from dagrl.orchestrator.cluster import reaper
from dagrl.workers.errors import RayLostError, RunError
from dagrl.workers.listener import listen

RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # CPU workers must not see the GPUs of their machine.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    # Results of workers go into the object store, not through the driver. Most columns are below Ray's default.
    "RAY_max_direct_call_object_size": "8192",
    # By default Ray's processes log their counters each minute, 115 MB a day. With -1 the control store prints them
    # without a pause.
    "RAY_event_stats_print_interval_ms": "3600000",
    # Ray ends if an agent does not answer in this time. The default is 30 seconds; a busy machine can need more.
    "RAY_agent_register_timeout_ms": "120000",
    # A worker's process starts on request. By default Ray also starts one for each core.
    "RAY_prestart_worker_first_driver": "0",
    # Ray's default is 15, which starves the workers beside any other busy process.
    "RAY_worker_niceness": "0",
}
_OBJECT_STORE_BYTES = 2 * 2**30
_LONGEST_TEMPORARY_FOLDER = 25
_SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def session_folder() -> Iterator[Path]:
    """A folder for Ray's files and the workers' temporary files, removed at the end: workers are killed."""
    # Ray adds some 65 characters for its sockets, and a socket's path has at most 107.
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
        if folder.exists():  # a process that Ray was just starting writes to it
            reaper.end_all_in(str(folder), [])


@contextmanager
def watched(folder: Path, epitaph: str) -> Iterator[Callable[[], None]]:
    """Start a reaper, which cleans up and prints `epitaph` if this process is killed.

    Yields a function that reports all new child processes to the reaper. They are killed at the end of the context.
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
        known.extend(process for process in there if process is not None)
        with contextlib.suppress(BrokenPipeError):  # the reaper was killed; this process still cleans up
            tell.write("".join(f"{process}\n" for process in known))
            tell.flush()

    tell.write(f"{folder}\n")
    tell.flush()
    try:
        yield watch
    finally:
        # Processes that Ray started since then name the folder on their command line, or write to it.
        reaper.end([*known, *reaper.started_with(str(folder)), *reaper.writing_in(str(folder))])
        with contextlib.suppress(BrokenPipeError):  # the reaper was killed
            tell.write(f"{reaper.CLEAN}\n")
            tell.close()
        watcher.wait(timeout=10)


def object_store_bytes() -> int:
    """Size of the object store. Ray would take 30% of the memory, and warn if shared memory is small."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(128 * 2**20, min(_OBJECT_STORE_BYTES, memory // 10))


def small_shared_memory() -> str:
    """A note if shared memory is too small, so that Ray puts the object store on the disk; else empty."""
    with contextlib.suppress(OSError):
        free, wanted = shutil.disk_usage(_SHARED_MEMORY).free, object_store_bytes()
        if free < wanted:
            return (
                f"{_SHARED_MEMORY} has {free / 2**30:.1f} GiB free, and Ray's object store takes {wanted / 2**30:.1f}: "
                "it is on the disk, which is slow; with Docker use --shm-size=16g or --ipc=host"
            )
    return ""


def keep_worker_logs(folder: Path, logs: Path, prefix: str = "") -> None:
    """Copy the workers' output, or the ends of it, to ``logs/PREFIX*``.

    Errors, such as a full disk, are ignored.
    """
    with contextlib.suppress(OSError):
        for file in folder.glob("session_*/logs/worker-*"):
            lines = ends_of(file).splitlines() if file.is_file() and not file.is_symlink() else []
            printed = [line for line in lines if not line.startswith((":job_id:", ":actor_name:"))]
            if printed:
                # This machine has its own run folder, because it does not share the driver's.
                logs.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                logs.mkdir(exist_ok=True)
                (logs / f"{prefix}{file.name}").write_text("\n".join(printed) + "\n")


_NO_PORT = -1
"""Ray's own dashboard agents report this for services that are off."""


@contextmanager
def quick_start(*, alone: bool = True) -> Iterator[None]:
    """Within the context, Ray starts without autoscaler, log monitor and dashboard; `alone`: on this machine alone.

    This saves two seconds of CPU time. `ray.init` has no options for it:

    - If it is alone, all ports are on the loopback interface. `ray.init` replaces 127.0.0.1 by the machine's address.
    - The raylet gets the ports of its two agents. Otherwise it waits for them and ends after 15 seconds, and a busy
      machine takes longer to import them.
    """
    from ray import _raylet
    from ray._private import node, parameter, ray_constants, services

    raylet: Any = _raylet  # compiled: its functions are unknown to a type checker
    parameters, start, start_server = parameter.RayParams, node.Node.start_ray_processes, services.start_api_server
    remote = ray_constants.ENABLE_RAY_CLUSTER
    ports = raylet.METRICS_AGENT_PORT_NAME, raylet.METRICS_EXPORT_PORT_NAME, raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME

    def start_ray_processes(self: Any) -> None:
        for name in ports:
            raylet.persist_port(self.get_session_dir_path(), self.node_id, name, _NO_PORT)
        with listen("127.0.0.1") as free:
            self._ray_params.runtime_env_agent_port = free.getsockname()[1]
        start(self)

    parameter.RayParams = partial(parameters, no_monitor=True, include_log_monitor=False)
    node.Node.start_ray_processes = start_ray_processes
    services.start_api_server = lambda *_, **__: ("", None)  # address and process
    if alone:
        # As on systems where Ray does not support clusters of several machines.
        ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        parameter.RayParams, node.Node.start_ray_processes = parameters, start
        services.start_api_server, ray_constants.ENABLE_RAY_CLUSTER = start_server, remote


_WATCH_S = 1.0
_LOG_LINES = 100
"""Last lines of the process's logs that go with the error."""


@asynccontextmanager
async def while_ray_lives() -> AsyncIterator[None]:
    """Within the context, raise RayLostError if a process of this run's own Ray ends on this machine.

    It is then also the cause of any other failure.
    """
    main = asyncio.current_task()
    assert main is not None
    lost: RayLostError | None = None

    async def watch() -> None:
        nonlocal lost
        while (lost := ended_process()) is None:
            await asyncio.sleep(_WATCH_S)
        main.cancel()

    watcher = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if lost is None:
            raise
        main.uncancel()
        raise lost from None
    except RunError as error:
        if (cause := ended_process()) is not None:
            raise cause from error
        raise
    finally:
        watcher.cancel()


def ended_process() -> RayLostError | None:
    """The error for an ended process of Ray, if any. A joined Ray has no processes here."""
    from ray._private import worker

    node = worker._global_node
    for name, started in node.all_processes.items() if node else ():
        for server in started:
            if (code := server.process.poll()) is not None:
                what = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
                return RayLostError(
                    f"the process {what}",
                    worker=f"Ray's {name} (pid {server.process.pid})",
                    hint="was it killed, or out of memory (see `dmesg`)? `dagrl run` goes on from the last checkpoint",
                    details=_ends_of_logs(Path(node.get_logs_dir_path()), name),
                )
    return None


def _ends_of_logs(logs: Path, name: str) -> str:
    words = []
    for log in sorted(logs.glob(f"{name}.*")):
        if lines := log.read_text(errors="replace").splitlines()[-_LOG_LINES:]:
            words += [f"{log.name}:", *lines]
    return "\n".join(words)
