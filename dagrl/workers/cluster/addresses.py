"""Finds a running Ray cluster before Ray tries to connect, which takes minutes if none answers."""

from __future__ import annotations

import socket
from pathlib import Path

RUNNING_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""`ray start` writes the cluster's address to this file."""
OWN = "local"
"""With this RAY_ADDRESS a run starts its own Ray, even if one runs on this machine."""
_KNOCK_TIMEOUT_S = 10.0


def running_here() -> str | None:
    """Address of the cluster that `ray start` has started on this machine. None if it does not answer."""
    try:
        address = RUNNING_CLUSTER.read_text().strip()
        connect(address)
    except OSError:
        # The file remains if a cluster is killed, and may belong to another user.
        return None
    return address or None


def connect(address: str) -> None:
    """Raise OSError within seconds if nothing listens at ``host:port``. Ray handles other kinds of addresses."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_KNOCK_TIMEOUT_S).close()


def is_of_a_client(address: str) -> bool:
    """Whether it is the address of a Ray client server. A client is not part of the cluster."""
    return address.startswith("ray://")
