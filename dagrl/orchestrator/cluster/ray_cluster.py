"""Joins a running Ray cluster, or starts a small one on this machine for the length of a run."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EACCES
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from dagrl.config.schema import Pipeline
from dagrl.orchestrator.cluster import reaper
from dagrl.orchestrator.cluster.interrupts import ignore_signals, keep_signals_from_ray
from dagrl.orchestrator.cluster.session import (
    RAY_VARIABLES,
    keep_worker_logs,
    object_store_bytes,
    quick_start,
    session_folder,
    small_shared_memory,
    watched,
)
from dagrl.scheduler.machines import Machine, MisfitError, assign_machines
from dagrl.workers.errors import RunError, WorkerLostError

RUNNING_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""`ray start` writes the cluster's address to this file."""
OWN = "local"
"""With this RAY_ADDRESS a run starts its own Ray, even if one runs on this machine."""
_CONNECT_TIMEOUT_S = 10.0
_PAUSE_S = 0.5
_LISTENS = "0A"
"""State of a socket in Linux's tables."""
_LONGEST_ADDRESS = 300
_LEAST_GIB_OF_A_SLOT = 0.1
"""Memory of a worker without a model: 33 workers with their Ray take 3.4 GiB."""


@contextmanager
def cluster(
    pipeline: Pipeline, logs: Path, note: Callable[[str], None], *, patient: bool = False
) -> Iterator[ModuleType]:
    """The connected `ray` module. Raises RunError if the cluster is too small.

    The cluster is the one at RAY_ADDRESS, or one started by `ray start` on this machine, or a new one. A new one ends
    with the context, and the output of its workers is copied to `logs`. `note` informs the user. `patient`: wait for
    lost machines to come back, up to ``run.start_timeout_s``.
    """
    for name, value in RAY_VARIABLES.items():
        os.environ.setdefault(name, value)
    named = os.environ.get("RAY_ADDRESS")
    address = named or running_here()
    if address and not named:
        note(f"joining the Ray that runs on this machine, at {address}; RAY_ADDRESS=local keeps a run to itself")
    theirs = None if address == OWN else address
    if not theirs:
        _check_home()
    import ray

    with _joined(ray, theirs, found_here=not named) if theirs else _started(ray, pipeline, logs, note):
        _check_resources(ray, pipeline, pipeline.run.start_timeout_s if patient else 0.0)
        yield ray


@contextmanager
def _joined(ray: ModuleType, address: str, *, found_here: bool) -> Iterator[None]:
    if is_of_a_client(address):
        raise RunError(
            f"RAY_ADDRESS is {address}, the address of a Ray client server, and a run must be part of the cluster",
            hint="start `dagrl run` on a machine of the cluster, with the HOST:PORT of its head in RAY_ADDRESS",
        )
    try:
        connect(address)
        _agree_on_token(address, found_here=found_here)
        with keep_signals_from_ray():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="dagrl")
    except (OSError, ValueError) as error:
        raise RunError(
            f"no Ray cluster answers at {address}: {error}",
            hint="for a Ray of the run's own, unset RAY_ADDRESS",
        ) from error
    except (RuntimeError, ray.exceptions.RayError) as error:
        # Another version of Ray or Python, or a wrong token: a message of several lines.
        reason = " ".join(str(error).split())
        raise RunError(
            f"the Ray cluster at {address} cannot be joined: {reason}",
            hint="use the versions and the token of the cluster; or, for a Ray of the run's own, unset RAY_ADDRESS "
            f"and end the one that {RUNNING_CLUSTER} names, if there is one",
        ) from error
    # If the cluster's head dies, Ray ends this process a minute later, without an exception.
    epitaph = f"{reaper.EPITAPH}. Ray also kills it if the cluster at {address} is gone"
    with TemporaryDirectory(prefix="dagrl-") as nothing, watched(Path(nothing), epitaph):
        try:
            yield
        finally:
            ray.shutdown()


def _agree_on_token(address: str, *, found_here: bool) -> None:
    """Send the user's token to a cluster that was found on this machine and asks for one.

    `ray start` asks for one if a token is in the home folder, where the first Ray that a program starts puts it. As in
    Ray, a cluster that the user names gets it only with RAY_AUTH_MODE=token. Raises RunError if the cluster asks for a
    token that it does not get: Ray would try for a long time.
    """
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
    from ray.exceptions import AuthenticationError

    logging.getLogger("ray").setLevel(logging.ERROR)  # as `ray.init` does below
    try:
        GcsClient(address=address).check_alive([], timeout=_CONNECT_TIMEOUT_S)
    except AuthenticationError as error:
        sends = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
        if found_here and not sends and maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
            return
        raise RunError(
            f"the Ray cluster at {address} " + ("does not take this token" if sends else "asks for a token"),
            hint="set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH unless it is in ~/.ray/auth_token",
        ) from error


@contextmanager
def _started(ray: ModuleType, pipeline: Pipeline, logs: Path, note: Callable[[str], None]) -> Iterator[None]:
    slots = sum(group.ranks for group in pipeline.groups.values() if group.is_cpu)
    _check_memory(slots, pipeline.run.host_workers)
    if warning := small_shared_memory():
        note(warning)
    note("starting Ray on this machine")
    for again in (True, False):
        with session_folder() as folder, watched(folder, reaper.EPITAPH) as watch:
            try:
                try:
                    _start(ray, slots, folder)
                except Exception as error:
                    # Ray has no exception type for processes that do not start within half a minute. The second start
                    # finds their files in memory.
                    if not again:
                        raise WorkerLostError(
                            f"Ray did not start on this machine, twice: {error}",
                            hint=f"is it overloaded, or full ({folder.parent}, /dev/shm)?",
                        ) from error
                    note(f"Ray did not start, and is started once more: {error}")
                else:
                    watch()
                    yield
                    return
            finally:
                # Everything from here on has a timeout, and an interrupt would leave processes behind.
                with ignore_signals():
                    watch()
                    ray.shutdown()
                    keep_worker_logs(folder, logs)


def _start(ray: ModuleType, slots: int, folder: Path) -> None:
    with keep_signals_from_ray(), quick_start():
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, slots),
            include_dashboard=False,
            object_store_memory=object_store_bytes(),
            _temp_dir=str(folder),
            log_to_driver=False,
            logging_level="ERROR",
            namespace="dagrl",
        )


def _check_home() -> None:
    """Make sure that Ray's token is in the home folder and readable by the user alone: Ray would make it readable for
    everyone.

    Raises RunError if the first Ray of a user could not write it.
    """
    if any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    folder = Path("~/.ray")
    try:
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        token = folder / "auth_token"
        if not os.access(token, os.R_OK) and not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
        _keep_private(token)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        raise RunError(
            f"Ray keeps its token in {folder}, which cannot be made or written: {getattr(error, 'strerror', error)}",
            hint="set HOME to a folder that can be written",
        ) from error


def _keep_private(token: Path) -> None:
    """Make the file readable by the user alone; if there is none, write a new token."""
    try:
        handle = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        with suppress(PermissionError):  # another user's file
            if token.stat().st_mode & 0o077:
                token.chmod(0o600)
    else:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32))


def _check_memory(slots: int, host_workers: int) -> None:
    """Raise RunError if the run's processes do not fit in memory: hundreds of them take the machine down."""
    # `dagrl doctor` imports this module, and reports a psutil that cannot be imported.
    import psutil

    needed, free = (slots + host_workers) * _LEAST_GIB_OF_A_SLOT, psutil.virtual_memory().available / 2**30
    if needed > free:
        raise RunError(
            f"the run starts a process for each of {slots} CPU slots and {host_workers} host workers on this machine: "
            f"they take at least {needed:.0f} GiB of memory, and {free:.0f} GiB are free",
            hint="make the groups smaller (cpus_per_node), or lower run.host_workers",
        )


def _check_resources(ray: ModuleType, pipeline: Pipeline, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            assign_machines(pipeline.groups, machines_of(ray))
        except MisfitError as error:
            if time.monotonic() >= deadline:
                raise RunError(
                    (f"waited {patience_s:g} s for machines to come back: " if patience_s else "") + str(error),
                    hint="make the groups smaller, or run where there is more; `dagrl launch` starts several machines",
                ) from error
            time.sleep(_PAUSE_S)
        else:
            return


def machines_of(ray: ModuleType, *, free: bool = False) -> list[Machine]:
    """The machines that are alive, the driver's first, then by address, with all their slots or only free ones."""
    from ray._private.state import available_resources_per_node

    left = available_resources_per_node() if free else {}
    own = ray.get_runtime_context().get_node_id()
    nodes = sorted(
        (node for node in ray.nodes() if node["Alive"]),
        key=lambda node: (node["NodeID"] != own, _address_key(node["NodeManagerAddress"]), node["NodeID"]),
    )
    machines = []
    for node in nodes:
        has = left.get(node["NodeID"], {}) if free else node["Resources"]
        name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        machines.append(Machine(name, int(has.get("GPU", 0)), int(has.get("CPU", 0)), node["NodeID"]))
    return machines


def _address_key(address: str) -> tuple[int, ...] | tuple[()]:
    """Numbers of an IPv4 address, so that .10 comes after .9; empty for others."""
    parts = address.split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


def running_here() -> str | None:
    """Address of the cluster that this user or root started on this machine with `ray start`.

    None if it does not answer. Others could write the file, which has a known name, or listen at the address once its
    cluster has ended, and a run sends the user's token there: only a file that no one else can write counts, and only
    an address of this machine at which this user or root listens.
    """
    try:
        with os.fdopen(os.open(RUNNING_CLUSTER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            theirs = status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if theirs or not stat.S_ISREG(status.st_mode):
                return None
            address = file.read(_LONGEST_ADDRESS).strip()
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            return None
        # Only an address of this machine can be listened at.
        socket.create_server((host, 0)).close()
        if not _listeners(int(port)) <= {os.getuid(), 0}:
            return None
        connect(address)
    except (OSError, ValueError):
        # The file remains if a cluster is killed.
        return None
    return address


def _listeners(port: int) -> set[int]:
    """Ids of the users that listen at a TCP port of this machine, at any of its addresses."""
    users = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except FileNotFoundError:  # the system has no IPv6
            continue
        for line in lines:
            _, local, _, state, _, _, _, user, *_ = line.split()
            if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                users.add(int(user))
    return users


def connect(address: str) -> None:
    """Raise OSError within seconds if nothing listens at ``host:port``. Ray handles other kinds of addresses."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()


def is_of_a_client(address: str) -> bool:
    """Whether it is the address of a Ray client server. A client is not part of the cluster."""
    return address.startswith("ray://")
