"""Short JSON messages between the processes of a weight sync. Every wait has a timeout and a description.

A `Listener` accepts clients on a Unix socket in a private folder (same machine) or over TCP, and rejects those without
its token. A peer that exits is noticed at once, because its end of the connection closes.
"""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

type Message = dict[str, Any]
"""A JSON object."""

_LONGEST_SOCKET_PATH = 100
_RETRY_S = 0.02
_POLL_S = 0.5
"""Interval at which `Listener.accept` checks whether the listener was closed."""
_HELLO_S, _LONGEST_HELLO = 10.0, 65536
"""Timeout and largest size, in bytes, of a client's first message."""


class PeerError(OSError):
    """The other side of a weight sync has exited, does not connect, or does not answer."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address and token of a `Listener`."""

    path: str
    """A Unix socket on the listener's machine; empty for TCP."""
    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


class Channel:
    """One end of a connection between two processes."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        """`peer` names the other process in messages."""
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(True)
        self._connection = Connection(connection.detach())
        self.peer = peer

    def fileno(self) -> int:
        """File descriptor, for ``multiprocessing.connection.wait``."""
        return self._connection.fileno()

    def send(self, **message: object) -> None:
        """Send a message. Raises PeerError if the peer has exited."""
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise PeerError(f"{self.peer} has ended during a weight sync") from error

    def receive(self, timeout_s: float, what: str, max_bytes: int | None = None) -> Message:
        """The peer's next message. Raises PeerError if the peer has exited, on timeout, or above `max_bytes`."""
        try:
            if not self._connection.poll(timeout_s):
                raise PeerError(f"waited {timeout_s:.0f} s for {what} from {self.peer}")
            return json.loads(self._connection.recv_bytes(max_bytes))
        except PeerError:
            raise
        except (EOFError, OSError) as error:
            raise PeerError(f"{self.peer} has ended during a weight sync, before {what}") from error

    @property
    def has_ended(self) -> bool:
        """Whether a peer that is not expected to send anything has exited."""
        try:
            return self._connection.poll(0)
        except OSError:
            return True

    def close(self) -> None:
        self._connection.close()


class Listener:
    """Accepts the clients of weight syncs."""

    def __init__(self, host: str | None = None) -> None:
        """Listen on a Unix socket, or on a free TCP port of `host`. Raises OSError if neither is available."""
        self._is_closed = False
        self._folder: Path | None = None
        token = secrets.token_hex(16)
        if host is None:
            self._folder = Path(tempfile.mkdtemp(prefix="dagrl-"))
            if len(str(self._folder)) > _LONGEST_SOCKET_PATH:
                self._folder.rmdir()
                self._folder = Path(tempfile.mkdtemp(prefix="dagrl-", dir="/tmp"))
            path = str(self._folder / "listener")
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(path)
            self._socket.listen(64)
            self.address = Address(path, "", 0, token)
        else:
            self._socket = socket.create_server((host, 0), backlog=64)
            self.address = Address("", host, self._socket.getsockname()[1], token)

    def accept(self, count: int, timeout_s: float, what: str, **expected: object) -> list[tuple[Channel, Message]]:
        """Accept `count` clients, each with its first message; clients whose message lacks `expected` are rejected.

        Raises PeerError with the number of accepted clients on timeout.
        """
        deadline = time.monotonic() + timeout_s
        accepted: list[tuple[Channel, Message]] = []
        try:
            while len(accepted) < count:
                channel = self._next(min(_POLL_S, deadline - time.monotonic()))
                if self._is_closed:
                    raise PeerError(f"stopped waiting for {what}")
                if channel is None and time.monotonic() < deadline:
                    continue
                if channel is None:
                    raise PeerError(f"waited {timeout_s:.0f} s for {what}: {len(accepted)} of {count} connected")
                hello = self._hello(channel)
                if hello is not None and all(hello.get(key) == value for key, value in expected.items()):
                    channel.peer = str(hello.get("who", channel.peer))
                    accepted.append((channel, hello))
                else:
                    channel.close()
        except BaseException:
            for channel, _ in accepted:
                channel.close()
            raise
        return accepted

    def close(self) -> None:
        """Stop listening; ends a concurrent `accept`."""
        self._is_closed = True
        self._socket.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _next(self, timeout_s: float) -> Channel | None:
        try:
            self._socket.settimeout(max(1e-3, timeout_s))
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        except OSError:
            if self._is_closed:
                return None
            raise
        return Channel(connection, "a client")

    def _hello(self, channel: Channel) -> Message | None:
        try:
            hello = channel.receive(_HELLO_S, "its first message", _LONGEST_HELLO)
        except (PeerError, ValueError):
            return None
        token = hello.pop("token", "") if isinstance(hello, dict) else ""
        # compare_digest accepts non-ASCII input only as bytes.
        return hello if secrets.compare_digest(str(token).encode(), self.address.token.encode()) else None


def connect(address: Address, timeout_s: float, peer: str, **hello: object) -> Channel:
    """Connect to the listener at `address` and send the first message; `peer` names its process.

    Raises PeerError on timeout.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if address.path:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(timeout_s)
                connection.connect(address.path)
            else:
                connection = socket.create_connection((address.host, address.port), timeout=timeout_s)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerError(f"{peer} does not answer at {address}: {error}") from error
            time.sleep(_RETRY_S)
    channel = Channel(connection, peer)
    channel.send(token=address.token, **hello)
    return channel
