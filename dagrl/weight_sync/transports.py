"""The transports of buckets from a sender to its receivers, and their protocol.

A transport serves one sync: `buffer` (to be filled) and `send` for each bucket in order, then `finish`. The other side
is `dagrl.weight_sync.receiver`. Receivers connect to the sender's listener while the first bucket is being filled:

    receiver -> sender: who, sync, manifest (digest of the one it knows), group (name of the update group it is in)
    sender -> receiver: manifest (if it differs), passes, and either buffers (IPC handles) or group (how to join)
    receiver -> sender, at the end: who, error, used
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
from torch import Tensor

from dagrl.weight_sync.channel import Channel, Listener, Message, PeerError
from dagrl.weight_sync.manifest import Manifest
from dagrl.weight_sync.staging import BUFFERS, Staging
from dagrl.weight_sync.update_group import UpdateGroup, wait_until

type GroupSetup = tuple[Message, Callable[[Callable[[], None]], UpdateGroup]]
"""Data that receivers need to join an update group, and a function that waits for them if the group is new. The
function's argument raises when waiting has become pointless."""


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

    def finish(self) -> list[Message]:
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

    def finish(self) -> list[Message]:
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
        self._accepted: list[tuple[Channel, Message]] = []

    @property
    def channels(self) -> list[Channel]:
        return [channel for channel, _ in self._accepted]

    def accept(self) -> list[Message]:
        """Wait for all receivers and return their first messages. Raises ValueError if one of them reports an error."""
        what = f"{self._count} processes of generators to ask for weights"
        self._accepted = self._listener.accept(self._count, self._session.timeout_s, what, sync=self._session.number)
        for _, hello in self._accepted:
            if hello.get("error"):
                raise ValueError(f"{hello['who']} {hello['error']}")
        return [hello for _, hello in self._accepted]

    def greet(self, details: Callable[[int], Mapping[str, object]]) -> None:
        """Send each receiver the session's parameters and the `details` for its index."""
        for index, (channel, hello) in enumerate(self._accepted):
            known = hello.get("manifest") == self._session.manifest.digest
            manifest = {} if known else {"manifest": self._session.manifest.to_json()}
            send_to(channel, passes=self._session.passes, **manifest, **details(index))

    def reports(self) -> list[Message]:
        """Final reports of all receivers. Raises ValueError as soon as one has left the sync."""
        reports: list[Message] = []
        waiting = self.channels
        deadline = time.monotonic() + self._session.timeout_s
        while waiting:
            # In order of arrival: the others may be waiting for one that has failed.
            done = wait(waiting, max(0.0, deadline - time.monotonic()))  # type: ignore[arg-type]
            ready = [channel for channel in waiting if channel in done]
            if not ready:
                late = ", ".join(channel.peer for channel in waiting)
                raise PeerError(f"waited {self._session.timeout_s:.0f} s for {late} to finish a weight sync")
            for channel in ready:
                reports.append(receive_from(channel, 0, "the end of a weight sync"))
                waiting.remove(channel)
        return reports

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


def send_to(channel: Channel, **message: object) -> None:
    """Send a message to a receiver. Raises ValueError with its last message if it has left the sync."""
    try:
        channel.send(**message)
    except PeerError:
        receive_from(channel, 0, "a message reached it")
        raise


def receive_from(channel: Channel, timeout_s: float, what: str) -> Message:
    """A receiver's next message. Raises ValueError if it says that the receiver has left the sync."""
    message = channel.receive(timeout_s, what)
    if message.get("left"):
        raise ValueError(f"{channel.peer}: {message['error']}")
    return message


class IpcTransport(Transport):
    """Shares this process's buffers with receivers on its machine: by CUDA IPC on one GPU, on CPUs by a memory file.

    Each rank of a trainer serves the receivers on its own GPU; a bucket's owner broadcasts it to the others.
    """

    def __init__(
        self,
        session: SyncSession,
        listener: Listener,
        receivers: int,
        staging: Staging,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`group` of all ranks of the trainer; None if there is only one."""
        self._session, self._staging, self._group = session, staging, group
        self._clients = Clients(listener, receivers, session) if receivers else None
        staging.open()
        self._sent = self._acknowledged = 0
        """Announced buckets, and buckets that all receivers have read."""
        self._last_sent = [0] * BUFFERS
        """Per buffer, the value of `_sent` after its last bucket."""

    def buffer(self, index: int) -> Tensor:
        slot = index % BUFFERS
        self._wait_for_acknowledgements(self._last_sent[slot])
        return self._staging.buffers[slot]

    def send(self, index: int) -> None:
        slot = index % BUFFERS
        buffer = self._staging.buffers[slot]
        if self._group is not None:
            bucket = self._session.manifest.buckets[index]
            dist.broadcast(buffer[: bucket.nbytes], bucket.owner, group=self._group)
        if buffer.device.type == "cuda":
            # The receivers' streams do not wait for ours.
            torch.cuda.current_stream().synchronize()
        if self._clients is None:
            return
        if not self._sent:
            self._clients.accept()
            self._clients.greet(lambda _: {"buffers": self._staging.share()})
        for channel in self._clients.channels:
            send_to(channel, bucket=index)
        self._sent += 1
        self._last_sent[slot] = self._sent

    def finish(self) -> list[Message]:
        self._wait_for_acknowledgements(self._sent)
        return self._clients.reports() if self._clients else []

    def give_up(self) -> None:
        if self._clients is not None:
            self._clients.close()
            self._clients = None

    def close(self) -> None:
        self.give_up()
        self._staging.close()

    def _wait_for_acknowledgements(self, count: int) -> None:
        while self._clients is not None and self._acknowledged < count:
            for channel in self._clients.channels:
                receive_from(channel, self._session.timeout_s, "the acknowledgement of a bucket")
            self._acknowledged += 1


class NcclTransport(Transport):
    """Broadcasts buckets from the trainer's rank 0 to receivers anywhere, by NCCL (gloo on CPUs).

    The next bucket can be filled while one is being sent.
    """

    def __init__(
        self,
        session: SyncSession,
        listener: Listener,
        receivers: int,
        buffers: Sequence[Tensor],
        set_up_group: Callable[[list[str | None]], GroupSetup],
    ) -> None:
        """`set_up_group` takes the names of the groups that the receivers are in."""
        self._session, self._buffers, self._set_up_group = session, buffers, set_up_group
        self._clients = Clients(listener, receivers, session)
        self._group: UpdateGroup | None = None
        self._works: list[dist.Work | None] = [None] * BUFFERS
        self._given_up = False

    def buffer(self, index: int) -> Tensor:
        slot = index % BUFFERS
        if not self._given_up and (work := self._works[slot]) is not None:
            assert self._group is not None
            self._group.wait(work)
            self._works[slot] = None
        return self._buffers[slot]

    def send(self, index: int) -> None:
        if self._given_up:
            return
        if self._group is None:
            self._group = self._join_group()
        slot = index % BUFFERS
        buffer = self._buffers[slot][: self._session.manifest.buckets[index].nbytes]
        self._works[slot] = self._group.broadcast(buffer)

    def finish(self) -> list[Message]:
        reports = self._clients.reports()
        for slot in range(BUFFERS):
            self.buffer(slot)
        if self._buffers[0].device.type == "cuda":
            done = torch.cuda.current_stream().record_event()
            wait_until(done.query, self._session.timeout_s, "the last broadcast of a weight sync to end on this GPU")
        return reports

    def give_up(self) -> None:
        self._given_up = True
        self._clients.close()

    def close(self) -> None:
        self._clients.close()

    def _join_group(self) -> UpdateGroup:
        message, join = self._set_up_group([hello.get("group") for hello in self._clients.accept()])
        self._clients.greet(lambda index: {"group": {**message, "rank": index + 1}})
        return join(self._check_receivers)

    def _check_receivers(self) -> None:
        """Raise if a receiver has exited or reports a failure early."""
        for channel in self._clients.channels:
            if channel.has_ended:
                receive_from(channel, 0, "it joined a broadcast")
