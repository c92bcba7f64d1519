"""Moves storages from a device to host memory and back, without changing the tensors that view them.

Used by engines that release device memory while they sleep.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from dagrl.backends.runtime.pinned_memory import add_pinned, unpin

_GIB = 2**30
_CHUNK_BYTES = 64 << 20
"""Whole huge pages: large enough to be worth a driver call, small enough to waste little."""
_ALIGNMENT = 256
"""Divides the chunk size."""

Storages = dict[int, torch.UntypedStorage]
"""Storages by the address of their C++ object, which is stable while their memory is freed and allocated."""


class HostMemory:
    """Host memory for the contents of storages, pinned if they are on a GPU; allocated once and reused."""

    def __init__(self, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunks: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return len(self._chunks) * self._chunk_bytes

    def put(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copy the contents to the host, over earlier ones; on a GPU, asynchronously."""
        for device, host in self.pieces(map(_bytes_of, storages)):
            host.copy_(device, non_blocking=True)

    def take(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copy the contents back into storages of the same sizes and order; on a GPU, asynchronously."""
        for device, host in self.pieces(map(_bytes_of, storages)):
            device.copy_(host, non_blocking=True)

    def swap(self, contents: Sequence[torch.Tensor]) -> None:
        """Exchange `contents`, uint8 [bytes] each, with the contents on the host; synchronous.

        On a GPU both directions overlap, with two temporary pieces of device memory.
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
            # Its place on the host is free when the earlier contents have arrived on the device.
            going.wait_stream(coming)
            with torch.cuda.stream(going):
                host.copy_(own, non_blocking=True)
                gone[place] = going.record_event()
        coming.wait_stream(going)
        coming.synchronize()

    def pieces(self, contents: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of `contents`, uint8 [bytes] each, with their places on the host, packed over the chunks."""
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
            # At interpreter exit the driver unpins it.
            weakref.finalize(self, unpin, self._chunks).atexit = False
        add_pinned(self._chunks, missing, self._chunk_bytes)


class OffloadableStorages:
    """Storages on the device that can be offloaded: their contents are kept on the host, or dropped."""

    def __init__(self, storages: Callable[[], Storages], *, keep: bool, rests_away: bool) -> None:
        """`storages` is called on each offload. Without `keep` contents come back as zeros. With `rests_away` the
        storages are offloaded, now and whenever they are not in use.
        """
        self._storages, self._keep, self._rests_away = storages, keep, rests_away
        self._host = HostMemory()
        self._away: list[tuple[torch.UntypedStorage, int]] | None = None
        self._arrival: torch.cuda.Event | None = None
        """Recorded when contents that are being copied back have arrived."""
        self._users = 0
        if rests_away:
            self._leave()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which the storages are on the device."""
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
        assert self._users == 0, "the storages are in use"
        if self._away is None:
            self._leave()

    def wake(self, *, in_background: bool = False) -> None:
        """Undo `sleep`. With `in_background`, the copy to a GPU overlaps computation; only `in_use` waits for it."""
        if self._rests_away:
            return
        if not (in_background and self._keep and torch.cuda.is_available()):
            self._come_back()
            return
        stream, storages = _stream_of_copies(), self._filled_up()
        # The memory may still be in use by earlier kernels.
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
        if torch.cuda.is_available():
            # Before the memory is reused.
            torch.cuda.synchronize()
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
        # Before another stream reads it, or the host overwrites the source.
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def _filled_up(self) -> list[torch.UntypedStorage]:
        """The storages with memory again, uninitialised."""
        assert self._away is not None, "the storages are on the device"
        storages = [storage for storage, _ in self._away]
        for storage, nbytes in self._away:
            storage.resize_(nbytes)
        self._away = None
        return storages


def storages_of(tensors: Iterable[torch.Tensor]) -> Storages:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in storages}


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def device_gib_used() -> float:
    """Used memory of this process's GPU, including other processes, as the driver reports it; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / _GIB


@functools.cache
def _stream_of_copies() -> torch.cuda.Stream:
    """The stream for all copies of this process's GPU, in order of request."""
    return torch.cuda.Stream()
