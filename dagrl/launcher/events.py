"""What can happen while a machine waits: all of it comes to one queue, so that nothing is waited for alone."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dagrl.scheduler.machines import Machine
from dagrl.workers.interrupts import ONE_WISH_S

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for the end."""
PATIENCE = 3
"""Such signals after which a machine waits for nobody any more."""


@dataclass(frozen=True, slots=True)
class Member:
    """A machine that has called."""

    rank: int
    machine: Machine
    address: str

    @property
    def where(self) -> str:
        """The machine, for messages."""
        return f"rank {self.rank} ({self.machine.name})"


@dataclass(frozen=True, slots=True)
class Came:
    """A machine has called."""

    member: Member


@dataclass(frozen=True, slots=True)
class Gone:
    """A machine has hung up, or is lost."""

    member: Member
    why: str


@dataclass(frozen=True, slots=True)
class Wrong:
    """Something is as it must not be."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody wants the end; for the `times`-th time."""

    who: str
    times: int


@dataclass(frozen=True, slots=True)
class Printed:
    """A process has printed a line."""

    line: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A process has ended."""

    name: str
    code: int


@dataclass(frozen=True, slots=True)
class Said:
    """The other side has said something."""

    word: str
    facts: dict[str, Any]


Event = Came | Gone | Wrong | Asked | Printed | Ended | Said


class Events:
    """The queue."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._watching: set[asyncio.Task[None]] = set()

    def put(self, event: Event) -> None:
        """Something has happened."""
        self._queue.put_nowait(event)

    async def next(self, timeout_s: float | None = None) -> Event | None:
        """What comes next; None where nothing does in time."""
        try:
            return await asyncio.wait_for(self._queue.get(), timeout_s)
        except TimeoutError:
            return None

    def watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        """Have the lines that a process prints, and its end, come here."""

        async def watching() -> None:
            if process.stdout is not None:
                async for line in process.stdout:
                    self.put(Printed(line.decode(errors="replace").strip()))
            self.put(Ended(name, await process.wait()))

        task = asyncio.create_task(watching())
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    @contextmanager
    def signals(self, who: str) -> Iterator[None]:
        """Ctrl-C and its kin come here too."""
        loop, times, last = asyncio.get_running_loop(), 0, -ONE_WISH_S

        def asked() -> None:
            nonlocal times, last
            if loop.time() - last >= ONE_WISH_S:
                times, last = times + 1, loop.time()
                self.put(Asked(who, times))

        # `nohup` has switched SIGHUP off, and means it.
        heard = [number for number in STOPPING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        for number in heard:
            loop.add_signal_handler(number, asked)
        try:
            yield
        finally:
            for number in heard:
                loop.remove_signal_handler(number)
