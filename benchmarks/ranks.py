"""Ranks of one host, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


def run_ranks(count: int, function: Callable[[int], Any]) -> None:
    """Call ``function(rank)`` in `count` fresh processes. RuntimeError where one fails; the others are then ended."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=function, args=(rank,), name=f"rank {rank}") for rank in range(count)]
    for rank in ranks:
        rank.start()
    try:
        while any(rank.is_alive() for rank in ranks):
            failed = [rank for rank in ranks if rank.exitcode]
            if failed:
                # The others may say something of interest too.
                time.sleep(2)
                raise RuntimeError(f"{failed[0].name} of {count} ended with exit code {failed[0].exitcode}")
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    failed = [rank for rank in ranks if rank.exitcode]
    if failed:
        raise RuntimeError(f"{failed[0].name} of {count} ended with exit code {failed[0].exitcode}")


def free_ports(count: int) -> list[int]:
    """Ports of this host that nobody listens on now, all different."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
