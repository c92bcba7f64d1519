"""How a sender's buckets get to those that take them: to processes that see its memory, or by broadcast to others.

A link is for one sync: `buffer`, to be filled, and `send`, for each bucket in order, then `finish`. `taker` is the
other side of both. Takers come to the sender's door while the first bucket is being filled. What they say at the door:

    who, sync, manifest (digest of the one they know), group (name of the update group they are in)

What they are told then: manifest (if it is another one), passes, and where to find buckets. In the end each tells what
has become of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dagrl.weight_sync.channel import Channel, Listener, PeerError
from dagrl.weight_sync.manifest import Manifest
from dagrl.weight_sync.staging import BUFFERS, Staging
from dagrl.weight_sync.update_group import UpdateGroup, until


@dataclass(frozen=True, slots=True)
class SyncSession:
    """What both sides of one sync agree on."""

    number: int
    manifest: Manifest
    passes: int
    """How often all buckets are sent: once, or once more to be compared."""
    timeout_s: float
    """Bound of every wait for the other side."""


class Transport(Protocol):
    """A way for buckets."""

    def buffer(self, index: int) -> Tensor | None:
        """Where bucket `index` is to be put, uint8, once it is free; None where this rank's is of no use."""
        ...

    def send(self, index: int) -> None:
        """The bucket is in its buffer, or will be once the current stream is there."""
        ...

    def finish(self) -> list[dict[str, Any]]:
        """Wait until all is taken; what the takers have to tell."""
        ...

    def give_up(self) -> None:
        """Serve the takers no more, who notice it at once. What concerns the trainer's ranks alone goes on."""
        ...

    def close(self) -> None:
        """Hang up, also after a failure."""
        ...


class DeferredErrors:
    """A link whose failure waits for the end.

    The ranks of a trainer fill buckets together: one of them that left early would have the others wait for it.
    """

    def __init__(self, link: Transport) -> None:
        self._link = link
        self._failure: PeerError | ValueError | None = None

    def buffer(self, index: int) -> Tensor | None:
        """See `Transport.buffer`."""
        try:
            return self._link.buffer(index)
        except (PeerError, ValueError) as failure:
            self._give_up(failure)
            return self._link.buffer(index)

    def send(self, index: int) -> None:
        """See `Transport.send`: it has done what concerns the trainer's ranks before it speaks to takers."""
        try:
            self._link.send(index)
        except (PeerError, ValueError) as failure:
            self._give_up(failure)

    def finish(self) -> list[dict[str, Any]]:
        """See `Transport.finish`. Raises what has gone wrong since the beginning."""
        if self._failure is not None:
            raise self._failure
        return self._link.finish()

    def give_up(self) -> None:
        """See `Transport.give_up`."""
        self._link.give_up()

    def close(self) -> None:
        """See `Transport.close`."""
        self._link.close()

    def _give_up(self, failure: PeerError | ValueError) -> None:
        self._failure = failure
        self._link.give_up()


class NullTransport:
    """Of a rank that only helps others to send."""

    def buffer(self, index: int) -> None:
        """None."""
        return

    def send(self, index: int) -> None:
        """Somebody else does."""

    def finish(self) -> list[dict[str, Any]]:
        """Nobody has anything to tell."""
        return []

    def give_up(self) -> None:
        """Nobody is served."""

    def close(self) -> None:
        """There is no line."""


class _Clients:
    """Those that have come to take weights."""

    def __init__(self, door: Listener, count: int, sync: SyncSession) -> None:
        self._door, self._count, self._sync = door, count, sync
        self._came: list[tuple[Channel, dict[str, Any]]] = []

    @property
    def channels(self) -> list[Channel]:
        return [channel for channel, _ in self._came]

    def admit(self) -> list[dict[str, Any]]:
        """Wait for them; what they said at the door."""
        what = f"{self._count} processes of generators to ask for weights"
        self._came = self._door.admit(self._count, self._sync.timeout_s, what, sync=self._sync.number)
        for _, hello in self._came:
            if hello.get("error"):
                raise ValueError(f"{hello['who']} {hello['error']}")
        return [hello for _, hello in self._came]

    def welcome(self, each: Callable[[int], Mapping[str, Any]]) -> None:
        """Tell them what they have to know; `each` gives what is for one of them."""
        for place, (channel, hello) in enumerate(self._came):
            known = hello.get("manifest") == self._sync.manifest.digest
            told = {} if known else {"manifest": self._sync.manifest.to_json()}
            _tell(channel, passes=self._sync.passes, **told, **each(place))

    def reports(self) -> list[dict[str, Any]]:
        """What has become of them, in the end. ValueError at once for one that takes no part any more."""
        reports: list[dict[str, Any]] = []
        waiting = self.channels
        deadline = time.monotonic() + self._sync.timeout_s
        while waiting:
            # Whoever speaks first: the others may wait for one that has failed.
            ready: list[Any] = wait(waiting, max(0.0, deadline - time.monotonic()))  # type: ignore[arg-type]
            if not ready:
                late = ", ".join(channel.peer for channel in waiting)
                raise PeerError(f"waited {self._sync.timeout_s:.0f} s for {late} to come to the end of a weight sync")
            for channel in ready:
                reports.append(_taken_part(channel.receive(0, "the end of a weight sync"), channel))
                waiting.remove(channel)
        return reports

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


class IpcTransport:
    """To processes on this machine, which look into this process's buffers: on the same GPU, or in the host's memory.

    Where the trainer has several ranks, each serves its own neighbours, and gets the buckets from rank 0 by `group`.
    """

    def __init__(
        self, sync: SyncSession, door: Listener, takers: int, staging: Staging, group: dist.ProcessGroup | None = None
    ) -> None:
        self._sync, self._staging, self._group = sync, staging, group
        self._visitors = _Clients(door, takers, sync) if takers else None
        staging.open()
        self._sent = self._taken = 0
        """Buckets that were announced, and those of them that are known to be taken."""
        self._last_in = [0] * BUFFERS
        """How many were announced when a buffer's bucket was, itself included."""

    def buffer(self, index: int) -> Tensor:
        """See `Transport.buffer`."""
        place = index % BUFFERS
        self._wait_until_taken(self._last_in[place])
        return self._staging.buffers[place]

    def send(self, index: int) -> None:
        """See `Transport.send`."""
        place = index % BUFFERS
        buffer = self._staging.buffers[place]
        if self._group is not None:
            dist.broadcast(buffer[: self._sync.manifest.buckets[index].nbytes], 0, group=self._group)
        if buffer.device.type == "cuda":
            # Another process's streams know nothing of ours.
            torch.cuda.current_stream().synchronize()
        if self._visitors is None:
            return
        if not self._sent:
            self._visitors.admit()
            self._visitors.welcome(lambda _: {"buffers": self._staging.share()})
        for channel in self._visitors.channels:
            _tell(channel, bucket=index)
        self._sent += 1
        self._last_in[place] = self._sent

    def finish(self) -> list[dict[str, Any]]:
        """See `Transport.finish`."""
        self._wait_until_taken(self._sent)
        return self._visitors.reports() if self._visitors else []

    def give_up(self) -> None:
        """See `Transport.give_up`: the group's buffers are filled on."""
        if self._visitors is not None:
            self._visitors.close()
            self._visitors = None

    def close(self) -> None:
        """See `Transport.close`."""
        if self._visitors is not None:
            self._visitors.close()
        self._staging.close()

    def _wait_until_taken(self, count: int) -> None:
        while self._visitors is not None and self._taken < count:
            for channel in self._visitors.channels:
                _taken_part(channel.receive(self._sync.timeout_s, "a sign that a bucket is taken"), channel)
            self._taken += 1


class NcclTransport:
    """To processes anywhere, by broadcast from this one. While one bucket is under way the next can be filled."""

    def __init__(
        self,
        sync: SyncSession,
        door: Listener,
        takers: int,
        buffers: Sequence[Tensor],
        meet: Callable[[list[str | None]], GroupSetup],
    ) -> None:
        """`meet` gives the group to send by, out of the names of those that the takers are in."""
        self._sync, self._buffers, self._meet = sync, buffers, meet
        self._visitors = _Clients(door, takers, sync)
        self._group: UpdateGroup | None = None
        self._works: list[dist.Work | None] = [None] * BUFFERS
        self._given_up = False

    def buffer(self, index: int) -> Tensor:
        """See `Transport.buffer`."""
        place = index % BUFFERS
        if self._given_up:
            return self._buffers[place]
        if (work := self._works[place]) is not None:
            assert self._group is not None
            self._group.wait(work)
            self._works[place] = None
        return self._buffers[place]

    def send(self, index: int) -> None:
        """See `Transport.send`."""
        if self._given_up:
            return
        if self._group is None:
            self._group = self._join()
        place = index % BUFFERS
        buffer = self._buffers[place][: self._sync.manifest.buckets[index].nbytes]
        self._works[place] = self._group.broadcast(buffer)

    def finish(self) -> list[dict[str, Any]]:
        """See `Transport.finish`."""
        reports = self._visitors.reports()
        for place in range(BUFFERS):
            self.buffer(place)
        if self._buffers[0].device.type == "cuda":
            done = torch.cuda.current_stream().record_event()
            until(done.query, self._sync.timeout_s, "the last broadcast of a weight sync to end on this GPU")
        return reports

    def give_up(self) -> None:
        """See `Transport.give_up`."""
        self._given_up = True
        self._visitors.close()

    def close(self) -> None:
        """See `Transport.close`."""
        self._visitors.close()

    def _join(self) -> UpdateGroup:
        meeting = self._meet([hello.get("group") for hello in self._visitors.admit()])
        self._visitors.welcome(lambda place: {"group": {**meeting.told, "rank": place + 1}})
        return meeting.join(self._look)

    def _look(self) -> None:
        """Raise where a taker has ended, or tells of a failure before its time."""
        for channel in self._visitors.channels:
            if channel.has_ended:
                _taken_part(channel.receive(0, "its part in a broadcast"), channel)


def _tell(channel: Channel, **message: Any) -> None:
    """Say something to a taker. ValueError with its last words where it has left already."""
    try:
        channel.send(**message)
    except PeerError:
        _taken_part(channel.receive(0, "what it was told"), channel)
        raise


def _taken_part(told: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """What a taker says. ValueError where it is that it takes no part any more."""
    if told.get("left"):
        raise ValueError(f"{channel.peer}: {told['error']}")
    return told


@dataclass(frozen=True, slots=True)
class GroupSetup:
    """The group that a broadcast goes by: one that is there, or a new one, and what takers are told of it."""

    told: dict[str, Any]
    join: Callable[[Callable[[], None]], UpdateGroup]
    """Waits for the others where it is a new one; the argument raises where that has become pointless."""
