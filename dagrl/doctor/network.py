"""Checks Ray, and this machine's rank in a job."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from dagrl.config.errors import counted
from dagrl.doctor.findings import Finding, hint, missing, ok
from dagrl.launcher.errors import LaunchError
from dagrl.launcher.node_rank import node_rank_from
from dagrl.orchestrator.cluster.ray_cluster import OWN, connect, is_of_a_client, running_here


def network() -> Iterator[Finding]:
    """Check how this machine reaches others."""
    yield _ray()
    yield _rank()


def _ray() -> Finding:
    address = os.environ.get("RAY_ADDRESS")
    if address == OWN:
        return ok("Ray", f"RAY_ADDRESS is {OWN}: a run starts its own cluster and ends it")
    if not address:
        if running := running_here():
            return hint("Ray", f"a cluster runs on this machine at {running}: `dagrl run` joins it")
        return ok("Ray", "none runs here; a run starts its own cluster and ends it")
    if is_of_a_client(address):
        return missing("Ray", f"RAY_ADDRESS is {address}, which serves Ray clients; set it to the cluster's HOST:PORT")
    try:
        connect(address)
    except OSError as error:
        return missing("Ray", f"RAY_ADDRESS is {address}, which does not answer ({error.strerror or error}); unset it")
    return hint("Ray", f"RAY_ADDRESS is {address}: `dagrl run` joins that cluster")


def _rank() -> Finding:
    name = "PET_* variables"
    try:
        node = node_rank_from(os.environ)
    except LaunchError as error:
        return missing(name, str(error))
    if node is None:
        return ok(name, "none for several machines: `dagrl launch` is `dagrl run`")
    where = f"rank {node.rank} of {counted(node.nodes, 'machine')}, rank 0 at {node.endpoint}"
    try:
        socket.getaddrinfo(node.master, None)
    except OSError:
        return missing(name, f"{where}; the name {node.master} does not resolve")
    if node.is_leader:
        try:
            with contextlib.closing(socket.create_server(("", node.port))):
                pass
        except OSError:
            return missing(name, f"{where}; the port is taken: choose another PET_MASTER_PORT for all machines")
    return ok(name, where)
