"""Addresses of this machine."""

from __future__ import annotations

import asyncio
import socket

import psutil

from dagrl.launcher.errors import LaunchError
from dagrl.launcher.node_rank import Place

EVERYWHERE = "0.0.0.0"
_NAME_TIMEOUT_S, _PAUSE_S = 30.0, 1.0


async def listening_address(place: Place) -> str:
    """Where rank 0 listens: PET_MASTER_ADDR, resolved, which must be an address of this machine.

    Kubeflow tells the master that it is `localhost`, and many machines take their own name for that: then all of its
    addresses, as only the others know at which they find it. LaunchError says what is wrong.
    """
    address = await _resolved(place.master)
    if _is_loopback(address):
        return EVERYWHERE
    own = own_addresses()
    if address not in own:
        raise LaunchError(
            f"PET_MASTER_ADDR is `{place.master}` ({address}), and rank 0 has {', '.join(own)}; start rank 0 where "
            "that address is, or give its own",
            code=2,
        )
    return address


def leads_nowhere(place: Place) -> bool:
    """Whether rank 0 is said to be at an address where each machine finds only itself."""
    try:
        found = socket.getaddrinfo(place.master, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return False
    return _is_loopback(str(found[0][4][0]))


async def _resolved(name: str) -> str:
    """The address of a name, which a cluster's name server may learn a moment after a machine has started."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _NAME_TIMEOUT_S
    while True:
        try:
            found = await loop.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
        except OSError as error:
            if loop.time() > deadline:
                raise LaunchError(
                    f"PET_MASTER_ADDR is `{name}`, which rank 0 cannot resolve: {error.strerror}; give its address",
                    code=2,
                ) from error
            await asyncio.sleep(_PAUSE_S)
        else:
            return str(found[0][4][0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def own_addresses() -> list[str]:
    """IPv4 addresses of this machine."""
    return [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family == socket.AF_INET
    ]
