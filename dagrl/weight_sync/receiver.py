"""The other side of `links`: runs in each process that holds a part of a generator's model, once for each sync.

Whatever goes wrong with the model itself is told to the sender in the end; until then the buckets go by untouched, so
that nobody waits for this process. Only a sender that is gone, or does not answer, ends it early.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dagrl.weight_sync.channel import Address, Channel, PeerError, connect
from dagrl.weight_sync.loader import WeightLoader
from dagrl.weight_sync.manifest import Manifest
from dagrl.weight_sync.protocol import first_line
from dagrl.weight_sync.releasable_buffer import ReleasableBuffer
from dagrl.weight_sync.staging import BUFFERS, attach, gpu_name
from dagrl.weight_sync.update_group import UpdateGroup, join_group, until

_SENDER = "the sender of weights"


@dataclass(frozen=True, slots=True)
class Route:
    """Where processes take their weights from in one sync; what a generator is told."""

    number: int
    senders: Mapping[str, Address]
    """By the GPU that a sender's buffers are on; by an empty name one for all, wherever they are."""
    timeout_s: float
    keeps_room: bool = False
    """Whether the memory that buckets come in is kept for the next sync."""

    def to_json(self) -> str:
        """As text."""
        senders = {place: address.to_json() for place, address in self.senders.items()}
        return json.dumps([self.number, senders, self.timeout_s, self.keeps_room])

    @staticmethod
    def from_json(text: str) -> Route:
        """Undo `to_json`."""
        number, told, timeout_s, keeps_room = json.loads(text)
        senders = {place: Address(**address) for place, address in told.items()}
        return Route(number, senders, timeout_s, keeps_room)


class WeightReceiver:
    """Takes weights into one model, sync after sync."""

    def __init__(self, intake: WeightLoader, device: torch.device, who: str) -> None:
        """`device` is the model's; `who` names this process, for messages."""
        self._intake, self._device, self._who = intake, device, who
        self._group: UpdateGroup | None = None
        self._rooms: list[ReleasableBuffer] = []

    def take(self, route: Route) -> None:
        """Take part in a sync.

        Of what goes wrong here the sender is told. PeerError where there is none any more, or it does not answer.
        """
        if self._device.type == "cuda":
            # What still reads the old weights.
            torch.cuda.synchronize()
        try:
            self._take_part(route)
        finally:
            if not route.keeps_room:
                for room in self._rooms:
                    room.give_back()

    def _take_part(self, route: Route) -> None:
        channel = self._connect(route)
        try:
            for room in self._rooms:
                # Most likely the same ones are wanted again, and the sender may not be ready yet.
                room.take()
            told = channel.receive(route.timeout_s, "an answer to a process that is there to take weights")
            passes = _Passes(self._intake, _manifest(told, self._intake), told["passes"])
            self._take(told, channel, passes, route.timeout_s)
            channel.send(who=self._who, error=passes.error, used=passes.used)
            if passes.error:
                self._intake.let_go()
        except (ValueError, RuntimeError) as error:
            # Memory that is not there, or cannot be seen: this process takes no part, and nobody need wait for it.
            channel.send(who=self._who, error=first_line(error), left=True)
            self._give_up()
        except BaseException:
            self._give_up()
            raise
        finally:
            channel.close()

    def _connect(self, route: Route) -> Channel:
        known = self._intake.manifest
        hello = {
            "who": self._who,
            "sync": route.number,
            "manifest": known.digest if known else None,
            "group": self._group.name if self._group else None,
        }
        place = "" if "" in route.senders else gpu_name(self._device)
        if place in route.senders:
            return connect(route.senders[place], route.timeout_s, _SENDER, **hello)
        error = (
            f"is on {place or 'a CPU'}, where the trainer has no rank: weight_sync.route cuda_ipc needs both on the "
            "same GPUs; choose broadcast"
        )
        # One of them waits for this process in vain.
        for address in route.senders.values():
            connect(address, route.timeout_s, _SENDER, **hello, error=error).close()
        raise PeerError(f"{self._who} {error}")

    @torch.no_grad()
    def _take(self, told: Mapping[str, Any], channel: Channel, passes: _Passes, timeout_s: float) -> None:
        """Take all buckets, and keep nothing of the buffers that they came in."""
        for index, buffer in self._buckets(told, channel, passes, timeout_s):
            passes.take(index, buffer)

    def _buckets(
        self, told: Mapping[str, Any], channel: Channel, passes: _Passes, timeout_s: float
    ) -> Iterator[tuple[int, Tensor]]:
        """Each bucket with a buffer that holds it until the next is asked for; all is done when none is left."""
        if "buffers" not in told:
            yield from self._from_afar(told["group"], channel, passes, timeout_s)
            return
        buffers = [attach(shared, self._device) for shared in told["buffers"]]
        own = self._take_rooms([passes.manifest.largest])[0] if buffers[0].device != self._device else None
        try:
            for _ in range(passes.buckets):
                index = channel.receive(timeout_s, "the next bucket of weights")["bucket"]
                buffer = buffers[index % BUFFERS]
                if own is not None:
                    nbytes = passes.manifest.buckets[index].nbytes
                    own[:nbytes].copy_(buffer[:nbytes])
                yield index, buffer if own is None else own
                if self._device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
                channel.send(done=index)
        finally:
            # The sender gives their memory back when it hears that this is over.
            self._intake.let_go_of_buffers()

    def _from_afar(
        self, told: Mapping[str, Any], channel: Channel, passes: _Passes, timeout_s: float
    ) -> Iterator[tuple[int, Tensor]]:
        rooms = self._take_rooms(passes.manifest.room(BUFFERS))
        group = self._join(told, channel, timeout_s)
        order = passes.order

        def ask(turn: int) -> dist.Work:
            nbytes = passes.manifest.buckets[order[turn]].nbytes
            return group.broadcast(rooms[order[turn] % BUFFERS][:nbytes])

        def has_room_beside(turn: int) -> bool:
            return turn + 1 < len(order) and (order[turn + 1] - order[turn]) % BUFFERS != 0

        # One comes in while the one before is taken, unless both need the same room, as between two passes.
        arriving = ask(0)
        for turn, index in enumerate(order):
            following = ask(turn + 1) if has_room_beside(turn) else None
            group.wait(arriving)
            yield index, rooms[index % BUFFERS]
            if turn + 1 < len(order):
                arriving = following or ask(turn + 1)
        if self._device.type == "cuda":
            done = torch.cuda.current_stream().record_event()
            until(done.query, timeout_s, f"broadcasts from {_SENDER}", lambda: _look(channel))

    def _take_rooms(self, sizes: list[int]) -> list[Tensor]:
        """Buffers of this process's own, the same objects as long as the same ones are wanted."""
        if [len(room.bytes) for room in self._rooms] != sizes:
            self._rooms = [ReleasableBuffer(nbytes, self._device) for nbytes in sizes]
        for room in self._rooms:
            room.take()
        return [room.bytes for room in self._rooms]

    def _join(self, told: Mapping[str, Any], channel: Channel, timeout_s: float) -> UpdateGroup:
        if self._group is None or self._group.name != told["name"]:
            self._leave_group()

            def make() -> UpdateGroup:
                store = dist.TCPStore(told["host"], told["port"], is_master=False)
                return UpdateGroup(told["name"], store, told["rank"], told["size"], self._device, timeout_s)

            self._group = join_group(make, timeout_s, lambda: _look(channel))
        return self._group

    def _give_up(self) -> None:
        self._intake.let_go()
        self._leave_group()
        # What is under way may still write into them.
        self._rooms = []

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.end()
            self._group = None


class _Passes:
    """What is done with the buckets of one sync, and what has become of it."""

    def __init__(self, intake: WeightLoader, manifest: Manifest, passes: int) -> None:
        self.manifest = manifest
        self.order = [*range(len(manifest.buckets))] * passes
        self.error: str | None = None
        """What has gone wrong; buckets that come after it go by."""
        self.used: str | None = None
        """The tensors that the model has a place for, a bit for each, in hexadecimal; where that is new."""
        self._intake, self._taken = intake, 0
        self._is_new = not intake.knows(manifest)
        intake.begin(manifest)

    @property
    def buckets(self) -> int:
        return len(self.order)

    def take(self, index: int, buffer: Tensor) -> None:
        last = index + 1 == len(self.manifest.buckets)
        try:
            if self.error is not None:
                return
            if self._taken < len(self.manifest.buckets):
                self._intake.take(index, buffer)
                if last:
                    self._end_taking()
            else:
                self._intake.compare(index, buffer)
                if last:
                    self._intake.end_comparing()
        except (ValueError, RuntimeError) as error:
            self.error = first_line(error)
        finally:
            self._taken += 1

    def _end_taking(self) -> None:
        self._intake.end()
        if self._is_new:
            used = self._intake.used
            bits = sum(1 << place for place, name in enumerate(self.manifest.names) if name in used)
            self.used = f"{bits:x}"
        if len(self.order) > len(self.manifest.buckets):
            self._intake.begin_comparing()


def _manifest(told: Mapping[str, Any], intake: WeightLoader) -> Manifest:
    manifest = Manifest.from_json(told["manifest"]) if "manifest" in told else intake.manifest
    assert manifest is not None, "whoever does not know what is sent is told"
    return manifest


def _look(channel: Channel) -> None:
    """PeerError where the sender has ended."""
    if channel.has_ended:
        raise PeerError(f"{_SENDER} has ended during a broadcast")
