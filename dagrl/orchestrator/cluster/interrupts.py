"""Signals: the first Ctrl-C, SIGTERM or SIGHUP ends a run at the next step boundary, the second one at once.

Before and after training they raise KeyboardInterrupt, so that everything is cleaned up.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

ONE_REQUEST_S = 0.5
"""Signals within this time count as one: `timeout` signals its child, and then the child's process group."""


@contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Within the context SIGTERM and SIGHUP act as Ctrl-C. A SIGHUP that `nohup` ignores stays ignored."""
    terminals = [number for number in (1, 2) if os.isatty(number)]

    def raise_interrupt(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _redirect(terminals)
        signal.raise_signal(signal.SIGINT)

    handlers: dict[int, Any] = {signal.SIGTERM: raise_interrupt}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        handlers[signal.SIGHUP] = raise_interrupt
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell ignores SIGINT for background jobs. Signals to this process alone must work.
        handlers[signal.SIGINT] = signal.default_int_handler
    with _handled(handlers):
        yield


@contextmanager
def ignore_signals() -> Iterator[None]:
    """Within the context signals are ignored: for clean-up that has a timeout and must not stop halfway."""
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


def _redirect(terminals: Iterable[int]) -> None:
    """Redirect output to /dev/null: the terminals are closed, and writing to them would raise an error."""
    null = os.open(os.devnull, os.O_WRONLY)
    for number in terminals:
        os.dup2(null, number)
    os.close(null)


@contextmanager
def keep_signals_from_ray() -> Iterator[None]:
    """Within the context Ray starts, and neither replaces our signal handlers nor shares our process group.

    Ray's handler of SIGTERM ends this process without clean-up. And `timeout`, `srun` and a closing terminal signal the
    whole process group, which would end Ray before a checkpoint is saved.
    """
    global _starting
    _set_process_group_of_children()
    before, _starting = signal.getsignal(signal.SIGTERM), True
    try:
        yield
    except SystemExit as ended:
        # Raised by Ray's handler during its start.
        raise KeyboardInterrupt from ended
    finally:
        _starting = False
        signal.signal(signal.SIGTERM, before)


_starting = False


@cache
def _set_process_group_of_children() -> None:
    """Children that are forked while Ray starts get separate process groups; Ray has no option for this."""

    def in_child() -> None:
        if _starting:
            os.setpgid(0, 0)

    os.register_at_fork(after_in_child=in_child)


class InterruptHandler:
    """Within its context, in a running loop, the first signal requests a stop and the second cancels the task."""

    def __init__(self, request_stop: Callable[[], None], note: Callable[[str], None]) -> None:
        self.training = False
        """Whether a step is running."""
        self._request_stop, self._note = request_stop, note
        self._requested: float | None = None
        """When a stop was requested, by the loop's clock."""

    def __enter__(self) -> InterruptHandler:
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
        if self._requested is not None and now - self._requested < ONE_REQUEST_S:
            return
        if self.training and self._requested is None:
            self._requested = now
            self._note("stopping after this step, with a checkpoint; Ctrl-C again to stop at once")
            self._request_stop()
        elif self._main is not None:
            self._main.cancel()
