"""A time limit that can stand still."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any


def _now() -> float:
    return asyncio.get_running_loop().time()


class PausableTimeout:
    """A timeout that stands still while its agent is paused. Each ``async with`` has the whole of it."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._left_s = limit_s, limit_s
        self._timeout: asyncio.Timeout | None = None
        self._paused = False
        self._since = 0.0
        self.seconds = 0.0
        """Time in all contexts, without pauses."""

    async def __aenter__(self) -> None:
        self._left_s, self._since = self._limit_s, _now()
        self._timeout = asyncio.timeout(None if self._paused else self._limit_s)
        await self._timeout.__aenter__()

    async def __aexit__(self, *raised: Any) -> None:
        assert self._timeout is not None
        timeout, self._timeout = self._timeout, None
        if not self._paused:
            self.seconds += _now() - self._since
        await timeout.__aexit__(*raised)

    def pause(self) -> None:
        if not self._paused and self._timeout is not None:
            passed = _now() - self._since
            self.seconds += passed
            self._left_s -= passed
            # It may have expired just now.
            with suppress(RuntimeError):
                self._timeout.reschedule(None)
        self._paused = True

    def go_on(self) -> None:
        if self._paused and self._timeout is not None:
            self._since = _now()
            with suppress(RuntimeError):
                self._timeout.reschedule(self._since + self._left_s)
        self._paused = False
