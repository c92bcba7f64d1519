"""IPv4 addresses of this machine."""

from __future__ import annotations

import asyncio
import socket

import psutil

from dagrl.launcher.errors import LaunchError
from dagrl.launcher.node_rank import NodeRank

ANY = "0.0.0.0"
_RESOLVE_TIMEOUT_S, _PAUSE_S = 30.0, 1.0


async def listening_address(node_rank: NodeRank) -> str:
    """The address on which rank 0 listens: PET_MASTER_ADDR, which must be an address of this machine.

    Kubeflow gives the master `localhost`, and many machines resolve their own name to the loopback interface. Rank 0
    then listens on all addresses, because only the others know its reachable one.
    """
    address = await _resolve(node_rank.master)
    if address.startswith("127."):
        return ANY
    own = [ip for addresses in interfaces().values() for ip in addresses]
    if address not in own:
        raise LaunchError(
            f"PET_MASTER_ADDR is `{node_rank.master}` ({address}), and rank 0 has {', '.join(own)}; start rank 0 on "
            "the machine with that address, or give its own",
            code=2,
        )
    return address


def is_loopback(name: str) -> bool:
    """Whether this machine resolves `name` to itself only."""
    try:
        return socket.gethostbyname(name).startswith("127.")
    except OSError:
        return False


def interfaces() -> dict[str, list[str]]:
    return {
        name: [item.address for item in addresses if item.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }


async def _resolve(name: str) -> str:
    """The address of `name`. Retries, because a cluster's name server may learn a name after the machine starts."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _RESOLVE_TIMEOUT_S
    while True:
        try:
            addresses = await loop.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
            return str(addresses[0][4][0])
        except OSError as error:
            if loop.time() > deadline:
                raise LaunchError(
                    f"PET_MASTER_ADDR is `{name}`, which rank 0 cannot resolve: {error.strerror}; give its address",
                    code=2,
                ) from error
        await asyncio.sleep(_PAUSE_S)
