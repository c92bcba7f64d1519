"""What leaves a device and comes back to it: storages are emptied and filled again, their contents wait on the host.

So everything that looks into them stays as it is: tensors, views of them, and whoever holds either. Used by the engines
that give memory back while others work.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from dagrl.backends.pinned_memory import add_pinned, unpin

_GIB = 2**30
_CHUNK_BYTES = 64 << 20
"""Whole huge pages, enough of them to be worth a call of the driver, and little to have too much."""
_ALIGNMENT = 256
"""A chunk is a multiple of it."""

Storages = dict[int, torch.UntypedStorage]
"""Storages by their address as objects, which stays while their memory comes and goes."""


class HostMemory:
    """Room on the host for the contents of storages, pinned where they are a GPU's; taken once and used again."""

    def __init__(self, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunks: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """What was taken from the host so far."""
        return len(self._chunks) * self._chunk_bytes

    def put(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copy the contents here, over what was put before. On a GPU the copies are queued only."""
        for device, host in self.pieces(map(_bytes_of, storages)):
            host.copy_(device, non_blocking=True)

    def take(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copy back what was put, into storages of the same sizes in the same order. On a GPU queued only."""
        for device, host in self.pieces(map(_bytes_of, storages)):
            device.copy_(host, non_blocking=True)

    def swap(self, contents: Sequence[torch.Tensor]) -> None:
        """Have `contents`, uint8 [bytes] each, change places with what is here; over when it returns.

        Both ways at once on a GPU, with room there for two pieces more.
        """
        if contents and contents[0].device.type == "cuda":
            self._swap_on_gpu(contents)
            return
        for device, host in self.pieces(contents):
            held = device.clone()
            device.copy_(host)
            host.copy_(held)

    def _swap_on_gpu(self, contents: Sequence[torch.Tensor]) -> None:
        coming, going = torch.cuda.current_stream(), _stream_of_copies()
        room = min(max(map(len, contents)), self._chunk_bytes)
        held = [torch.empty(room, dtype=torch.uint8, device=contents[0].device) for _ in range(2)]
        gone: list[torch.cuda.Event | None] = [None, None]
        for turn, (device, host) in enumerate(self.pieces(contents)):
            place = turn % 2
            if (before := gone[place]) is not None:
                coming.wait_event(before)
            own = held[place][: len(device)].copy_(device)
            device.copy_(host, non_blocking=True)
            # Its place on the host is free when what was there has come.
            going.wait_stream(coming)
            with torch.cuda.stream(going):
                host.copy_(own, non_blocking=True)
                gone[place] = going.record_event()
        coming.wait_stream(going)
        coming.synchronize()

    def pieces(self, contents: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of `contents`, uint8 [bytes] each, with their places here: they lie end to end, over the chunks."""
        contents = list(contents)
        self._make_room(contents)
        position = 0
        for content in contents:
            done = 0
            while done < len(content):
                chunk, start = divmod(position, self._chunk_bytes)
                length = min(len(content) - done, self._chunk_bytes - start)
                yield content[done : done + length], self._chunks[chunk][start : start + length]
                done += length
                position += length
            position += -position % _ALIGNMENT

    def _make_room(self, contents: Sequence[torch.Tensor]) -> None:
        needed = sum(len(content) + -len(content) % _ALIGNMENT for content in contents)
        missing = -(-needed // self._chunk_bytes) - len(self._chunks)
        if missing <= 0:
            return
        if not any(content.is_cuda for content in contents):
            self._chunks += [torch.empty(self._chunk_bytes, dtype=torch.uint8) for _ in range(missing)]
            return
        if not self._chunks:
            # At the end of the process the driver does it.
            weakref.finalize(self, unpin, self._chunks).atexit = False
        add_pinned(self._chunks, missing, self._chunk_bytes)


class OffloadableStorages:
    """Storages on the device that can be away: their contents wait on the host, or are dropped."""

    def __init__(self, storages: Callable[[], Storages], *, keep: bool, rests_away: bool) -> None:
        """`storages` is asked whenever the part leaves. Without `keep` it comes back as zeros. With `rests_away` it
        is away whenever nobody uses it, beginning now.
        """
        self._storages, self._keep, self._rests_away = storages, keep, rests_away
        self._host = HostMemory()
        self._away: list[tuple[torch.UntypedStorage, int]] | None = None
        self._arrival: torch.cuda.Event | None = None
        """When contents that are on their way have come."""
        self._users = 0
        if rests_away:
            self._leave()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within the context the part is on the device."""
        if self._away is not None:
            self._come_back()
        self._await_arrival()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0 and self._rests_away:
                self._leave()

    def sleep(self) -> None:
        """Be away until `wake`, used or not."""
        assert self._users == 0, "the part is in use"
        if self._away is None:
            self._leave()

    def wake(self, *, in_background: bool = False) -> None:
        """Undo `sleep`. In the background, contents come to a GPU while it computes; only `in_use` waits for them."""
        if self._rests_away:
            return
        if not (in_background and self._keep and torch.cuda.is_available()):
            self._come_back()
            return
        stream, storages = _stream_of_copies(), self._filled_up()
        # Which may still be using the memory for what was there before.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._host.take(storages)
            self._arrival = stream.record_event()

    def _await_arrival(self) -> None:
        if self._arrival is not None:
            torch.cuda.current_stream().wait_event(self._arrival)
            self._arrival = None

    def _leave(self) -> None:
        self._await_arrival()
        storages = list(self._storages().values())
        if self._keep:
            self._host.put(storages)
        # Before the memory is given to somebody else.
        _synchronize()
        self._away = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def _come_back(self) -> None:
        storages = self._filled_up()
        if self._keep:
            self._host.take(storages)
        else:
            for storage in storages:
                _bytes_of(storage).zero_()
        # Before another stream reads it, or the host writes to what it is copied from.
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def _filled_up(self) -> list[torch.UntypedStorage]:
        """The storages with memory again, whose contents are anything."""
        assert self._away is not None, "the part is on the device"
        storages = [storage for storage, _ in self._away]
        for storage, nbytes in self._away:
            storage.resize_(nbytes)
        self._away = None
        return storages


def storages_of(tensors: Iterable[torch.Tensor]) -> Storages:
    """The storages that tensors look into, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in storages}


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def device_gib_used() -> float:
    """What is taken on this process's GPU, as the driver counts it, by other processes too; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / _GIB


@functools.cache
def _stream_of_copies() -> torch.cuda.Stream:
    """One for all parts of the process's GPU: what is asked for first comes first."""
    return torch.cuda.Stream()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
