"""The receiving side of weight syncs, in each process that holds a part of a generator's model.

Failures of the model are reported to the sender at the end of the sync. Until then this process keeps receiving, so
that it does not block the others. Only a sender that has exited, or does not answer, ends a sync early.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dagrl.weight_sync.adapter_loader import AdapterLoader
from dagrl.weight_sync.channel import Address, Channel, Message, PeerError, connect
from dagrl.weight_sync.loader import WeightLoader
from dagrl.weight_sync.manifest import Manifest
from dagrl.weight_sync.protocol import first_line
from dagrl.weight_sync.staging import BUFFERS, ReleasableBuffer, attach, gpu_name
from dagrl.weight_sync.update_group import UpdateGroup, join_group, wait_until

Loader = WeightLoader | AdapterLoader
_SENDER = "the sender of weights"


@dataclass(frozen=True, slots=True)
class Route:
    """The senders of one sync for a generator's processes."""

    number: int
    senders: Mapping[str, Address]
    """Keyed by the UUID of the GPU with the sender's buffers; an empty key for one sender that serves all."""
    timeout_s: float
    keep_buffers: bool = False
    """Whether receive buffers stay allocated for the next sync."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Route:
        fields = json.loads(text)
        senders = {gpu: Address(**address) for gpu, address in fields.pop("senders").items()}
        return Route(senders=senders, **fields)


class WeightReceiver:
    """Receives the weights of one model, sync after sync."""

    def __init__(self, loader: Loader, device: torch.device, who: str) -> None:
        """`device` of the model; `who` names this process in messages."""
        self._loader, self._device, self._who = loader, device, who
        self._group: UpdateGroup | None = None
        self._buffers: list[ReleasableBuffer] = []

    def receive(self, route: Route) -> None:
        """Take part in a sync.

        Reports failures to the sender. Raises PeerError if the sender has exited or does not answer.
        """
        if self._device.type == "cuda":
            # Wait for kernels that still read the old weights.
            torch.cuda.synchronize()
        try:
            self._take_part(route)
        finally:
            if not route.keep_buffers:
                for buffer in self._buffers:
                    buffer.release()

    def _take_part(self, route: Route) -> None:
        channel = self._connect(route)
        try:
            for buffer in self._buffers:
                # The same sizes are probably needed again, and the sender may not be ready yet.
                buffer.allocate()
            greeting = channel.receive(route.timeout_s, "an answer to a process that asks for weights")
            passes = _Passes(self._loader, _manifest(greeting, self._loader), greeting["passes"])
            with torch.no_grad():
                for index, bucket in self._buckets(greeting, channel, passes, route.timeout_s):
                    passes.load(index, bucket)
                    del bucket  # The sender frees it.
            channel.send(who=self._who, error=passes.error, used=passes.used)
            if passes.error:
                self._loader.reset()
        except (ValueError, RuntimeError) as error:
            # No memory, or no access to the sender's: leave the sync, so that the others need not wait.
            channel.send(who=self._who, error=first_line(error), left=True)
            self._give_up()
        except BaseException:
            self._give_up()
            raise
        finally:
            channel.close()

    def _connect(self, route: Route) -> Channel:
        known = self._loader.manifest
        hello = {
            "who": self._who,
            "sync": route.number,
            "manifest": known.digest if known else None,
            "group": self._group.name if self._group else None,
        }
        gpu = "" if "" in route.senders else gpu_name(self._device)
        if gpu in route.senders:
            return connect(route.senders[gpu], route.timeout_s, _SENDER, **hello)
        error = (
            f"is on {gpu or 'a CPU'}, where the trainer has no rank: weight_sync.route cuda_ipc needs both on the "
            "same GPUs; choose broadcast"
        )
        # One of the senders waits for this process.
        for address in route.senders.values():
            connect(address, route.timeout_s, _SENDER, **hello, error=error).close()
        raise PeerError(f"{self._who} {error}")

    def _buckets(
        self, greeting: Message, channel: Channel, passes: _Passes, timeout_s: float
    ) -> Iterator[tuple[int, Tensor]]:
        """Each bucket in a buffer that is valid until the next one is requested."""
        if "buffers" not in greeting:
            yield from self._broadcast_buckets(greeting["group"], channel, passes, timeout_s)
            return
        shared = [attach(buffer, self._device) for buffer in greeting["buffers"]]
        copies = self._loader.prefers_own_buffer or shared[0].device != self._device
        own = self._allocate(passes.manifest.buffer_sizes(1))[0] if copies else None
        try:
            for _ in passes.order:
                index = channel.receive(timeout_s, "the next bucket of weights")["bucket"]
                bucket = shared[index % BUFFERS]
                if own is not None:
                    nbytes = passes.manifest.buckets[index].nbytes
                    own[:nbytes].copy_(bucket[:nbytes])
                yield index, bucket if own is None else own
                if self._device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
                channel.send(done=index)
        finally:
            # The sender releases their memory at the end of the sync. Views of our own stay valid.
            if own is None:
                self._loader.release_buffers()

    def _broadcast_buckets(
        self, invitation: Message, channel: Channel, passes: _Passes, timeout_s: float
    ) -> Iterator[tuple[int, Tensor]]:
        buffers = self._allocate(passes.manifest.buffer_sizes(BUFFERS))
        group = self._join(invitation, channel, timeout_s)
        order = passes.order

        def request(turn: int) -> dist.Work:
            nbytes = passes.manifest.buckets[order[turn]].nbytes
            return group.broadcast(buffers[order[turn] % BUFFERS][:nbytes])

        def can_overlap(turn: int) -> bool:
            return turn + 1 < len(order) and (order[turn + 1] - order[turn]) % BUFFERS != 0

        # The next bucket arrives while one is loaded, unless both need the same buffer, for example between two passes.
        arriving = request(0)
        for turn, index in enumerate(order):
            following = request(turn + 1) if can_overlap(turn) else None
            group.wait(arriving)
            yield index, buffers[index % BUFFERS]
            if turn + 1 < len(order):
                arriving = following or request(turn + 1)
        if self._device.type == "cuda":
            done = torch.cuda.current_stream().record_event()
            wait_until(done.query, timeout_s, f"broadcasts from {_SENDER}", lambda: _check_sender(channel))

    def _allocate(self, sizes: list[int]) -> list[Tensor]:
        """Receive buffers of these sizes in bytes; the same tensors while the sizes are the same."""
        if [len(buffer.bytes) for buffer in self._buffers] != sizes:
            self._buffers = [ReleasableBuffer(nbytes, self._device) for nbytes in sizes]
        for buffer in self._buffers:
            buffer.allocate()
        return [buffer.bytes for buffer in self._buffers]

    def _join(self, invitation: Message, channel: Channel, timeout_s: float) -> UpdateGroup:
        if self._group is None or self._group.name != invitation["name"]:
            self._leave_group()

            def make() -> UpdateGroup:
                store = dist.TCPStore(invitation["host"], invitation["port"], is_master=False)
                rank, size = invitation["rank"], invitation["size"]
                return UpdateGroup(invitation["name"], store, rank, size, self._device, timeout_s)

            self._group = join_group(make, timeout_s, lambda: _check_sender(channel))
        return self._group

    def _give_up(self) -> None:
        self._loader.reset()
        self._leave_group()
        # A broadcast in flight may still write into them.
        self._buffers = []

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.end()
            self._group = None


class _Passes:
    """Loads the buckets of one sync, compares the buckets of a second pass, and keeps the first error."""

    def __init__(self, loader: Loader, manifest: Manifest, passes: int) -> None:
        self.manifest = manifest
        self.order = [*range(len(manifest.buckets))] * passes
        self.error: str | None = None
        """The first failure; later buckets are ignored."""
        self.used: str | None = None
        """Bit mask of the tensors that the model uses, in hexadecimal; None if the sender already has it."""
        self._loader, self._received = loader, 0
        self._is_new = not loader.knows(manifest)
        loader.begin(manifest)

    def load(self, index: int, buffer: Tensor) -> None:
        buckets = len(self.manifest.buckets)
        is_last = index + 1 == buckets
        try:
            if self.error is not None:
                return
            if self._received < buckets:
                self._loader.load(index, buffer)
                if is_last:
                    self._end_loading()
            else:
                self._loader.compare(index, buffer)
                if is_last:
                    self._loader.end_comparing()
        except (ValueError, RuntimeError) as error:
            self.error = first_line(error)
        finally:
            self._received += 1

    def _end_loading(self) -> None:
        self._loader.end()
        if self._is_new:
            used = self._loader.used
            self.used = f"{sum(1 << bit for bit, name in enumerate(self.manifest.names) if name in used):x}"
        if len(self.order) > len(self.manifest.buckets):
            self._loader.begin_comparing()


def _manifest(greeting: Message, loader: Loader) -> Manifest:
    manifest = Manifest.from_json(greeting["manifest"]) if "manifest" in greeting else loader.manifest
    assert manifest is not None, "the sender sends the manifest to receivers that lack it"
    return manifest


def _check_sender(channel: Channel) -> None:
    """Raise PeerError if the sender has exited."""
    if channel.has_ended:
        raise PeerError(f"{_SENDER} has ended during a broadcast")
