"""The protocol between a sender and its receivers, and what the transports share.

A transport serves one sync: `buffer` (to be filled) and `send` for each bucket in order, then `finish`. The other side
is `dagrl.weight_sync.receiver`. Receivers connect to the sender's listener while the first bucket is being filled:

    receiver -> sender: who, sync, manifest (digest of the one it knows), group (name of the update group it is in)
    sender -> receiver: manifest (if it differs), passes, and either buffers (IPC handles) or group (how to join)
    receiver -> sender, at the end: who, error, used
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from torch import Tensor

from dagrl.weight_sync.channel import Channel, Listener, PeerError
from dagrl.weight_sync.manifest import Manifest


@dataclass(frozen=True, slots=True)
class SyncSession:
    """The parameters of one sync, equal on both sides."""

    number: int
    manifest: Manifest
    passes: int
    """How often all buckets are sent: 1, or 2 if the second pass is compared with the first."""
    timeout_s: float
    """Timeout of every wait for the other side."""


class Transport:
    """Sends the buckets of one sync. This base class is for a rank that only takes part in filling them."""

    def buffer(self, index: int) -> Tensor | None:
        """Buffer for bucket `index`, uint8, once it is free; None on ranks whose bucket is not used."""
        return None

    def send(self, index: int) -> None:
        """Send the bucket, which is in its buffer as soon as the current stream has run."""

    def finish(self) -> list[dict[str, Any]]:
        """Wait until all receivers are done, and return their reports."""
        return []

    def give_up(self) -> None:
        """Disconnect the receivers, but continue the collectives among the trainer's ranks."""

    def close(self) -> None:
        """Close connections and release buffers, also after a failure."""


class ErrorDeferringTransport(Transport):
    """Raises errors only in `finish`.

    The ranks of a trainer fill buckets with collectives: a rank that left early would block the others.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._failure: PeerError | ValueError | None = None

    def buffer(self, index: int) -> Tensor | None:
        try:
            return self._transport.buffer(index)
        except (PeerError, ValueError) as failure:
            self._defer(failure)
            return self._transport.buffer(index)

    def send(self, index: int) -> None:
        """See `Transport.send`, which completes the trainer's collectives before it talks to receivers."""
        try:
            self._transport.send(index)
        except (PeerError, ValueError) as failure:
            self._defer(failure)

    def finish(self) -> list[dict[str, Any]]:
        """See `Transport.finish`. Raises the first deferred error."""
        if self._failure is not None:
            raise self._failure
        return self._transport.finish()

    def _defer(self, failure: PeerError | ValueError) -> None:
        self._failure = failure
        self._transport.give_up()


class Clients:
    """The receivers of one sync, as their sender sees them."""

    def __init__(self, listener: Listener, count: int, session: SyncSession) -> None:
        self._listener, self._count, self._session = listener, count, session
        self._accepted: list[tuple[Channel, dict[str, Any]]] = []

    @property
    def channels(self) -> list[Channel]:
        return [channel for channel, _ in self._accepted]

    def accept(self) -> list[dict[str, Any]]:
        """Wait for all receivers and return their first messages. Raises ValueError if one of them reports an error."""
        what = f"{self._count} processes of generators to ask for weights"
        self._accepted = self._listener.accept(self._count, self._session.timeout_s, what, sync=self._session.number)
        for _, hello in self._accepted:
            if hello.get("error"):
                raise ValueError(f"{hello['who']} {hello['error']}")
        return [hello for _, hello in self._accepted]

    def greet(self, details: Callable[[int], Mapping[str, Any]]) -> None:
        """Send each receiver the session's parameters and the `details` for its index."""
        for index, (channel, hello) in enumerate(self._accepted):
            known = hello.get("manifest") == self._session.manifest.digest
            manifest = {} if known else {"manifest": self._session.manifest.to_json()}
            tell(channel, passes=self._session.passes, **manifest, **details(index))

    def reports(self) -> list[dict[str, Any]]:
        """Final reports of all receivers. Raises ValueError as soon as one has left the sync."""
        reports: list[dict[str, Any]] = []
        waiting = self.channels
        deadline = time.monotonic() + self._session.timeout_s
        while waiting:
            # In order of arrival: the others may be waiting for one that has failed.
            ready: list[Any] = wait(waiting, max(0.0, deadline - time.monotonic()))  # type: ignore[arg-type]
            if not ready:
                late = ", ".join(channel.peer for channel in waiting)
                raise PeerError(f"waited {self._session.timeout_s:.0f} s for {late} to finish a weight sync")
            for channel in ready:
                reports.append(hear(channel, 0, "the end of a weight sync"))
                waiting.remove(channel)
        return reports

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


def tell(channel: Channel, **message: Any) -> None:
    """Send a message to a receiver. Raises ValueError with its last message if it has left the sync."""
    try:
        channel.send(**message)
    except PeerError:
        hear(channel, 0, "a message reached it")
        raise


def hear(channel: Channel, timeout_s: float, what: str) -> dict[str, Any]:
    """A receiver's next message. Raises ValueError if it says that the receiver has left the sync."""
    message = channel.receive(timeout_s, what)
    if message.get("left"):
        raise ValueError(f"{channel.peer}: {message['error']}")
    return message
