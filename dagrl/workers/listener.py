"""The port on which a worker, or a process that it starts, listens."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 20000
"""Ray's workers have ports below it."""
_TRIES = 100


def listen(address: str) -> socket.socket:
    """Listen on a free port outside the kernel's range for outgoing connections, if there is one.

    Otherwise another program could use the port before an engine's process, which imports for many seconds, listens on
    it. Raises OSError if no port is free.
    """
    end = int(_LOCAL_PORTS.read_text().split()[0]) if _LOCAL_PORTS.exists() else _FIRST
    ports = range(_FIRST, end)
    for port in random.SystemRandom().sample(ports, min(_TRIES, len(ports))):
        try:
            return socket.create_server((address, port))
        except OSError:
            continue
    return socket.create_server((address, 0))
