"""Ray clusters that a run may join, before Ray itself is asked: it would try for minutes."""

from __future__ import annotations

import socket
from pathlib import Path

RUNNING_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Where `ray start` writes the address of the cluster on this machine."""
OWN = "local"
"""What RAY_ADDRESS may say for a Ray of the run's own, though one runs on this machine."""
_KNOCK_TIMEOUT_S = 10.0


def running_here() -> str | None:
    """Address of the cluster that `ray start` has started on this machine; None where none answers."""
    try:
        address = RUNNING_CLUSTER.read_text().strip()
        knock(address)
    except OSError:
        # The file outlives clusters that were killed, and may be another user's.
        return None
    return address or None


def knock(address: str) -> None:
    """OSError within seconds where nobody listens at ``host:port``; what is no such address is left to Ray."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_KNOCK_TIMEOUT_S).close()


def is_of_a_client(address: str) -> bool:
    """Whether it is where Ray's client is served, through which nobody becomes part of the cluster."""
    return address.startswith("ray://")
