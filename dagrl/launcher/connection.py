"""A connection between two machines of a job: one JSON object per line, with heartbeats.

A side that receives nothing for `SILENCE_S` seconds treats the other as lost, because a cut cable closes no connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable

HEARTBEAT_S = 2.0
SILENCE_S = 20.0
_MAX_LINE_BYTES = 1 << 16
_HEARTBEAT = "heartbeat"


class LostError(ConnectionError):
    """The other side is gone, or does not speak this protocol."""


class Connection:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._heartbeat = asyncio.create_task(self._send_heartbeats())
        self.own_address: str = writer.get_extra_info("sockname")[0]
        """Address of this machine on the route to the other."""
        self.address: str = writer.get_extra_info("peername")[0]
        """Address of the other machine."""

    @classmethod
    async def open(cls, host: str, port: int, timeout_s: float) -> Connection:
        """Connect to a listening machine. OSError if none answers in time."""
        opening = asyncio.open_connection(host, port, family=socket.AF_INET, limit=_MAX_LINE_BYTES)
        return cls(*await asyncio.wait_for(opening, timeout_s))

    def send(self, kind: str, **fields: object) -> None:
        """Send a message without waiting; it is lost if the other side is gone."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    async def recv(self) -> dict[str, object]:
        """The next message, a mapping with ``kind``. LostError if the connection fails or closes."""
        while True:
            try:
                line = await asyncio.wait_for(self._reader.readline(), SILENCE_S)
            except TimeoutError:
                raise LostError(f"no heartbeat for {SILENCE_S:g} s: it is down, or cut off") from None
            except ConnectionResetError:
                # A killed process leaves data unread, so that its kernel resets the connection.
                line = b""
            except (OSError, ValueError) as error:
                raise LostError(str(error)) from error
            if not line:
                raise LostError("it closed the connection")
            try:
                message = json.loads(line)
                kind = message["kind"]
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise LostError("it does not speak the protocol of `dagrl launch`") from error
            if kind != _HEARTBEAT:
                return message

    async def close(self) -> None:
        """Flush for a moment at most, and close."""
        self._heartbeat.cancel()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), HEARTBEAT_S)
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), HEARTBEAT_S)

    async def _send_heartbeats(self) -> None:
        while True:
            self.send(_HEARTBEAT)
            await asyncio.sleep(HEARTBEAT_S)


async def listen(address: str, port: int, serve: Callable[[Connection], Awaitable[None]]) -> asyncio.Server:
    """Call `serve` with each incoming connection. OSError if the address cannot be used."""

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        try:
            await serve(connection)
        finally:
            await connection.close()

    return await asyncio.start_server(accepted, address, port, limit=_MAX_LINE_BYTES)
