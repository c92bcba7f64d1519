"""Two buffers that buckets wait in by turns, in memory that another process on the machine can see.

On a GPU they are shared by CUDA IPC, for which the other process must use the same GPU; on the host by an open file
that is nowhere but in memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dagrl.weight_sync.manifest import Manifest
from dagrl.weight_sync.protocol import first_line
from dagrl.weight_sync.releasable_buffer import ReleasableBuffer

BUFFERS = 2
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


class DeviceStaging:
    """Buffers on a GPU. Their memory is there between `open` and `close`, and views of them for good."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        """`sizes` are the buffers', in bytes."""
        with _memory_that_can_be_shared():
            self._rooms = [ReleasableBuffer(nbytes, device) for nbytes in sizes]

    @property
    def buffers(self) -> list[Tensor]:
        """uint8 [bytes] each, the same objects always."""
        return [room.bytes for room in self._rooms]

    def open(self) -> None:
        """Take the memory, if it is not there."""
        with _memory_that_can_be_shared():
            for room in self._rooms:
                room.take()

    def share(self) -> list[dict[str, Any]]:
        """What another process has to know to `attach` the buffers; it must do so once for each call."""
        return [_shared(room.bytes) for room in self._rooms]

    def close(self) -> None:
        """Give the memory back to torch's allocator. The other processes have let go of it."""
        for room in self._rooms:
            room.give_back()
        # What a process that has died did not let go of.
        torch.cuda.ipc_collect()


class HostStaging:
    """Buffers in the host's memory, of the same use."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes` are the buffers', in bytes."""
        self._sizes = sizes
        self._files: list[int] = []
        self._buffers: list[Tensor] = []
        self.open()

    @property
    def buffers(self) -> list[Tensor]:
        """uint8 [bytes] each."""
        return self._buffers

    def open(self) -> None:
        """Take the memory, if it is not there."""
        if not self._buffers:
            for nbytes in self._sizes:
                self._files.append(os.memfd_create("dagrl-weights"))
                os.truncate(self._files[-1], nbytes)
                self._buffers.append(_mapped(self._files[-1], nbytes))

    def share(self) -> list[dict[str, Any]]:
        """See `DeviceStaging.share`."""
        named = [f"/proc/{os.getpid()}/fd/{file}" for file in self._files]
        return [{"file": file, "nbytes": nbytes} for file, nbytes in zip(named, self._sizes, strict=True)]

    def close(self) -> None:
        """Give the memory back, once the other processes have too."""
        for file in self._files:
            os.close(file)
        self._files, self._buffers = [], []


Staging = DeviceStaging | HostStaging


def staging_on(device: torch.device, manifest: Manifest) -> Staging:
    """Buffers for the buckets of `manifest`, by turns."""
    # Where there is but one bucket the second would be empty, and memory of no bytes cannot be shared.
    sizes = [nbytes for nbytes in manifest.room(BUFFERS) if nbytes]
    return DeviceStaging(sizes, device) if device.type == "cuda" else HostStaging(sizes)


def attach(shared: Mapping[str, Any], device: torch.device) -> Tensor:
    """Another process's buffer, uint8 [bytes], which must be let go of before that gives its memory back.

    `device` is this process's GPU. ValueError where the buffer cannot be seen from here.
    """
    if "file" in shared:
        try:
            # The other one's open file, by a name that the kernel gives it.
            with Path(shared["file"]).open("r+b") as file:
                return _mapped(file.fileno(), shared["nbytes"])
        except OSError as error:
            raise ValueError(f"the sender's memory cannot be seen from this process: {error}") from error
    handle, counter, event = (bytes.fromhex(shared[key]) for key in ("handle", "counter", "event"))
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index, handle, shared["nbytes"], shared["offset"], counter, shared["count"], event, shared["waits"]
        )
    except RuntimeError as error:
        raise ValueError(
            f"the sender's memory on this GPU cannot be opened by CUDA IPC: {first_line(error)}; "
            "choose weight_sync.route: broadcast or object_store"
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def gpu_name(device: torch.device) -> str:
    """The same for a GPU in every process, whatever its number there; empty for a CPU."""
    return "" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def _shared(buffer: Tensor) -> dict[str, Any]:
    storage = buffer.untyped_storage()
    _, handle, nbytes, offset, counter, count, event, waits = storage._share_cuda_()
    return {
        "handle": handle.hex(),
        "nbytes": nbytes,
        "offset": offset,
        "counter": counter.hex(),
        "count": count,
        "event": event.hex(),
        "waits": waits,
    }


def _mapped(file: int, nbytes: int) -> Tensor:
    # The tensor keeps the mapping, which lasts longer than the open file.
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)


@contextmanager
def _memory_that_can_be_shared() -> Iterator[None]:
    """Segments that grow cannot be opened by other processes; where torch is told to use them, it takes others here."""
    told = next((os.environ[name] for name in _SETTINGS if _EXPANDABLE in os.environ.get(name, "")), None)
    if told is None or not torch.cuda.is_available():
        yield
        return
    torch.cuda.memory._set_allocator_settings(told.replace(_EXPANDABLE, "expandable_segments:False"))
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings(told)
