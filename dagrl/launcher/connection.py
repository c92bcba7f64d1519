"""A connection between two machines of a job: words as JSON lines, with signs of life between them.

Nothing that comes in is more than text and numbers. Whoever hears nothing for `SILENCE_S` seconds takes the other for
lost: a cable that is cut says no goodbye.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

BEAT_S = 2.0
"""Between signs of life."""
SILENCE_S = 20.0
"""Without a sign of life the other side is lost."""
_LONGEST_LINE = 1 << 16
_BEAT = "beat"


class LostError(ConnectionError):
    """The other side is gone, or does not speak our language."""


class Wire:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._beating = asyncio.create_task(self._beat())
        self.own_address: str = writer.get_extra_info("sockname")[0]
        """Address of this machine on the way to the other."""
        self.address: str = writer.get_extra_info("peername")[0]
        """Address of the other."""

    @classmethod
    async def connect(cls, host: str, port: int, timeout_s: float) -> Wire:
        """Call somebody who listens. OSError where nobody answers in time."""
        opening = asyncio.open_connection(host, port, family=socket.AF_INET, limit=_LONGEST_LINE)
        return cls(*await asyncio.wait_for(opening, timeout_s))

    def say(self, word: str, **facts: Any) -> None:
        """Send a word; it is on its way at once, and lost where the other is."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"word": word, **facts}).encode() + b"\n")

    async def hear(self) -> dict[str, Any]:
        """The next word, as a mapping with ``word``. LostError where none will come."""
        while True:
            try:
                line = await asyncio.wait_for(self._reader.readline(), SILENCE_S)
            except TimeoutError:
                raise LostError(f"nothing was heard for {SILENCE_S:g} s: it is down, or cut off") from None
            except (OSError, ValueError) as error:
                raise LostError(str(error)) from error
            if not line:
                raise LostError("it has closed the connection")
            try:
                said = json.loads(line)
                word = said["word"]
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise LostError("it does not speak as `dagrl launch` does") from error
            if word != _BEAT:
                return said

    async def close(self) -> None:
        """Send what is still to be sent, for a moment at most, and hang up."""
        self._beating.cancel()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), BEAT_S)
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), BEAT_S)

    async def _beat(self) -> None:
        while True:
            self.say(_BEAT)
            await asyncio.sleep(BEAT_S)


async def listen(address: str, port: int, answer: Any) -> asyncio.Server:
    """Have `answer(wire)` called for whoever calls. OSError where one cannot listen there."""

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        try:
            await answer(wire)
        finally:
            await wire.close()

    return await asyncio.start_server(answered, address, port, limit=_LONGEST_LINE)
