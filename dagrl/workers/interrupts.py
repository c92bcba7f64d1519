"""Ctrl-C and its kin: the first ends a run at the next step boundary, a second one at once.

Where the run is not at its steps yet, or not any more, they are an exception, so that everything is cleaned up.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any, Protocol

ONE_WISH_S = 0.5
"""What comes within it counts once: `timeout` signals its child, and then its group, which the child is in."""


class Stoppable(Protocol):
    """What can be asked to end in good order."""

    def request_stop(self) -> None:
        """End at the next step boundary."""
        ...


class Notes(Protocol):
    """Who tells the user."""

    def note(self, message: str) -> None:
        """Tell it."""
        ...


@contextmanager
def kin_of_ctrl_c() -> Iterator[None]:
    """Within the context SIGTERM and SIGHUP are what Ctrl-C is, but for a SIGHUP that `nohup` has switched off."""
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def as_ctrl_c(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _forget(terminals)
        signal.raise_signal(signal.SIGINT)

    handlers: dict[int, Any] = {signal.SIGTERM: as_ctrl_c}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        handlers[signal.SIGHUP] = as_ctrl_c
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # Of a script's background job: what is meant for it alone has to reach it.
        handlers[signal.SIGINT] = signal.default_int_handler
    with _handled(handlers):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """Within the context none of them does anything: for what has a bound, and must not be done by half."""
    with _handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN)):
        yield


@contextmanager
def _handled(handlers: Mapping[int, Any]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _forget(terminals: Iterable[int]) -> None:
    """They are gone: what is written to them from now on is an error, and a run does not end with that."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in terminals:
        os.dup2(nowhere, number)
    os.close(nowhere)


@contextmanager
def ray_starts() -> Iterator[None]:
    """Within the context Ray starts, or is joined, and signals stay ours.

    Ray takes SIGTERM for itself: it would end this process, and nothing would be put in order. And its processes would
    belong to our group, all of which `timeout`, `srun` and a terminal that closes tell of the end: they would be gone
    before a checkpoint is saved.
    """
    global _starting
    _watch_births()
    before, _starting = signal.getsignal(signal.SIGTERM), True
    try:
        yield
    except SystemExit as ended:
        # Ray's handler, in the midst of its start.
        raise KeyboardInterrupt from ended
    finally:
        _starting = False
        signal.signal(signal.SIGTERM, before)


_starting = False


@cache
def _watch_births() -> None:
    """Have children that are born while Ray starts lead groups of their own; Ray has no option for that."""

    def in_child() -> None:
        if _starting:
            os.setpgid(0, 0)

    os.register_at_fork(after_in_child=in_child)


class Interrupts:
    """Within its context, inside a running loop, the first asks for the end and the second cancels the task."""

    def __init__(self, run: Stoppable, notes: Notes) -> None:
        self.training = False
        """Whether there is a step to finish."""
        self._run = run
        self._notes = notes
        self._asked: float | None = None
        """When it was asked for the end, by the loop's clock."""

    def __enter__(self) -> Interrupts:
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        self._before = signal.getsignal(signal.SIGINT)
        self._loop.add_signal_handler(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, self._before)

    def _interrupt(self) -> None:
        now = self._loop.time()
        if self._asked is not None and now - self._asked < ONE_WISH_S:
            return
        if self.training and self._asked is None:
            self._asked = now
            self._notes.note("stopping after this step, with a checkpoint; Ctrl-C again to stop at once")
            self._run.request_stop()
        elif self._main is not None:
            self._main.cancel()
