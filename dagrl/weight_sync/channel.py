"""How two processes talk about weights under way: short JSON messages, and every wait with a bound and a name.

A `Listener` takes visitors: by a socket in a private folder where all are on one machine, by TCP where they are not.
Whoever does not bring the door's token is sent away. A peer that ends is noticed at once, as its end of the line is.
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

_LONGEST_SOCKET_PATH = 100
_KNOCK_PAUSE_S = 0.02
_GLANCE_S = 0.5
"""How often a door that waits looks whether it was closed."""
_HELLO_S, _LONGEST_HELLO = 10.0, 65536
"""How long a visitor may take to say who it is, and how many bytes."""


class PeerError(OSError):
    """The other side of a weight sync has ended, does not come, or does not answer."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a door is, and what opens it."""

    path: str
    """Of a socket on the door's machine; empty for TCP."""
    host: str
    port: int
    token: str

    def to_json(self) -> dict[str, Any]:
        """As a plain dict."""
        return {"path": self.path, "host": self.host, "port": self.port, "token": self.token}

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


class Channel:
    """One end of a line between two processes."""

    def __init__(self, line: socket.socket, peer: str) -> None:
        """`peer` names the other process, for messages."""
        if line.family != socket.AF_UNIX:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.setblocking(True)
        self._connection = Connection(line.detach())
        self.peer = peer

    def fileno(self) -> int:
        """The line, for ``multiprocessing.connection.wait``."""
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Say something. PeerError where nobody is there any more."""
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise PeerError(f"{self.peer} has ended during a weight sync") from error

    def receive(self, timeout_s: float, what: str, longest: int | None = None) -> dict[str, Any]:
        """What the peer says next. PeerError where it has ended, says nothing for so long, or more bytes than that."""
        try:
            if not self._connection.poll(timeout_s):
                raise PeerError(f"waited {timeout_s:.0f} s for {what} from {self.peer}")
            return json.loads(self._connection.recv_bytes(longest))
        except PeerError:
            raise
        except (EOFError, OSError) as error:
            raise PeerError(f"{self.peer} has ended during a weight sync, before {what}") from error

    @property
    def has_ended(self) -> bool:
        """Whether a peer that has nothing to say now is gone."""
        try:
            return self._connection.poll(0)
        except OSError:
            return True

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


class Listener:
    """Takes the visitors of weight syncs."""

    def __init__(self, host: str | None = None) -> None:
        """Listen on a socket in a folder of this user's, or on a port of `host`. OSError where that cannot be had."""
        self._is_closed = False
        self._folder: Path | None = None
        token = secrets.token_hex(16)
        if host is None:
            self._folder = Path(tempfile.mkdtemp(prefix="dagrl-"))
            if len(str(self._folder)) > _LONGEST_SOCKET_PATH:
                self._folder.rmdir()
                self._folder = Path(tempfile.mkdtemp(prefix="dagrl-", dir="/tmp"))
            path = str(self._folder / "door")
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(path)
            self._listener.listen(64)
            self.address = Address(path, "", 0, token)
        else:
            self._listener = socket.create_server((host, 0), backlog=64)
            self.address = Address("", host, self._listener.getsockname()[1], token)

    def admit(self, count: int, timeout_s: float, what: str, **wanted: Any) -> list[tuple[Channel, dict[str, Any]]]:
        """Take so many visitors, each with what it said first; those whose first words lack `wanted` are sent away.

        PeerError, saying how many have come, where they are not there in time.
        """
        deadline = time.monotonic() + timeout_s
        came: list[tuple[Channel, dict[str, Any]]] = []
        try:
            while len(came) < count:
                channel = self._next(min(_GLANCE_S, deadline - time.monotonic()))
                if self._is_closed:
                    raise PeerError(f"stopped waiting for {what}")
                if channel is None and time.monotonic() < deadline:
                    continue
                if channel is None:
                    raise PeerError(f"waited {timeout_s:.0f} s for {what}: {len(came)} of {count} came to be served")
                hello = self._hello(channel)
                if hello is not None and all(hello.get(key) == value for key, value in wanted.items()):
                    channel.peer = str(hello.get("who", channel.peer))
                    came.append((channel, hello))
                else:
                    channel.close()
        except BaseException:
            for channel, _ in came:
                channel.close()
            raise
        return came

    def close(self) -> None:
        """Listen no more, also if somebody waits in `admit`."""
        self._is_closed = True
        self._listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _next(self, timeout_s: float) -> Channel | None:
        try:
            self._listener.settimeout(max(1e-3, timeout_s))
            line, _ = self._listener.accept()
        except TimeoutError:
            return None
        except OSError:
            if self._is_closed:
                return None
            raise
        return Channel(line, "a visitor")

    def _hello(self, channel: Channel) -> dict[str, Any] | None:
        try:
            hello = channel.receive(_HELLO_S, "its first words", _LONGEST_HELLO)
        except (PeerError, ValueError):
            return None
        token = hello.pop("token", "") if isinstance(hello, dict) else ""
        # As bytes: of text, it compares ASCII only.
        return hello if secrets.compare_digest(str(token).encode(), self.address.token.encode()) else None


def connect(address: Address, timeout_s: float, whose: str, **hello: Any) -> Channel:
    """A line to the door at `address`, of the process that `whose` names, with the first words said.

    PeerError where nobody opens in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if address.path:
                line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                line.settimeout(timeout_s)
                line.connect(address.path)
            else:
                line = socket.create_connection((address.host, address.port), timeout=timeout_s)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerError(f"{whose} does not answer at {address}: {error}") from error
            time.sleep(_KNOCK_PAUSE_S)
    channel = Channel(line, whose)
    channel.send(token=address.token, **hello)
    return channel
