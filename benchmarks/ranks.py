"""Ranks of one host, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from dagrl.backends.backend import RankContext


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


def apart[Result](function: Callable[[], Result]) -> Result:
    """Call `function` in a process that then ends, and leaves no memory of a GPU with this one."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, function))
    process.start()
    there.close()
    try:
        found: Result = here.recv()
    except EOFError:
        raise RuntimeError("a measurement failed in its process; see the error above") from None
    finally:
        process.join()
    return found


def _send(connection: Connection, function: Callable[[], Any]) -> None:
    connection.send(function())


class Meetings:
    """Where ranks meet, once for each group of processes that they form: rank 0 holds the ports, so nobody takes them.

    Made by the process that starts the ranks, for `count` groups; `join` is then called in each rank.
    """

    def __init__(self, count: int) -> None:
        self._ports = multiprocessing.get_context("spawn").Array("i", count)

    def join(self, rank: int, ranks: int, timeout_s: float = 600.0) -> Iterator[RankContext]:
        """The ranks' places in one group after the other."""
        if rank == 0:
            sockets = [socket.socket() for _ in self._ports[:]]
            for held in sockets:
                held.bind(("127.0.0.1", 0))
            self._ports[:] = [held.getsockname()[1] for held in sockets]
        deadline = time.monotonic() + timeout_s
        while not all(self._ports[:]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 did not start within {timeout_s:.0f} s")
            time.sleep(0.05)
        for number, port in enumerate(self._ports[:]):
            listen_fd = sockets[number].detach() if rank == 0 else None
            yield RankContext(rank, ranks, "127.0.0.1", port, timeout_s, 1, listen_fd=listen_fd)
