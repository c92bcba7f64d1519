"""A job from the view of one of its machines, and the signals that stop it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dagrl.config.schema import Pipeline
from dagrl.launcher.node_rank import NodeRank
from dagrl.orchestrator.cluster.interrupts import ONE_REQUEST_S
from dagrl.scheduler.machines import Machine

STOP_AT_ONCE = 3
"""After this many stop signals a machine stops waiting."""


@dataclass(frozen=True, slots=True)
class Job:
    """The work of this machine, and its reports to the user."""

    node_rank: NodeRank
    machine: Machine
    """This machine, and the slots that groups may use."""
    pipeline: Pipeline
    arguments: list[str]
    """Arguments of `dagrl run`."""
    logs: Path
    """Folder that keeps the output of workers."""
    variables: dict[str, str]
    """Environment of the command."""
    note: Callable[[str], None]
    """Prints a message."""


@contextmanager
def stop_signals(on_stop: Callable[[int], None]) -> Iterator[None]:
    """Call `on_stop` with 1, 2, ... for each Ctrl-C, SIGTERM or SIGHUP of this machine within the context."""
    loop, count, last = asyncio.get_running_loop(), 0, -ONE_REQUEST_S

    def handle() -> None:
        nonlocal count, last
        if loop.time() - last >= ONE_REQUEST_S:
            count, last = count + 1, loop.time()
            on_stop(count)

    numbers = [signal.SIGINT, signal.SIGTERM]
    # `nohup` ignores SIGHUP on purpose.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
