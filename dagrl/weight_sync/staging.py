"""Device memory that is needed only during a weight sync, and buffers in it that processes on a machine share.

On a GPU they are shared by CUDA IPC, which requires the other process to be on the same GPU; on the host by a memory
file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dagrl.weight_sync.channel import Message
from dagrl.weight_sync.manifest import Manifest
from dagrl.weight_sync.protocol import first_line

BUFFERS = 2
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


class ReleasableBuffer:
    """A buffer that releases and allocates its memory again. Views of `bytes` stay valid across both."""

    def __init__(self, nbytes: int, device: torch.device | str) -> None:
        # Generators run in inference mode, whose tensors cannot be used outside it.
        with torch.inference_mode(False):
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        """uint8 [nbytes]; the contents are lost on release."""

    @property
    def is_allocated(self) -> bool:
        """Whether the memory is allocated; always true for a buffer of no bytes."""
        return self.bytes.untyped_storage().nbytes() == len(self.bytes)

    def allocate(self) -> None:
        if not self.is_allocated:
            self.bytes.untyped_storage().resize_(len(self.bytes))

    def release(self) -> None:
        """Return the memory to torch's allocator. No stream may still use it."""
        self.bytes.untyped_storage().resize_(0)


class DeviceStaging:
    """Buffers on a GPU. Their memory is allocated between `open` and `close`; views of them stay valid."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        with _sharable_memory():
            self._buffers = [ReleasableBuffer(nbytes, device) for nbytes in sizes]

    @property
    def buffers(self) -> list[Tensor]:
        """uint8 [bytes] each; always the same objects."""
        return [buffer.bytes for buffer in self._buffers]

    def open(self) -> None:
        with _sharable_memory():
            for buffer in self._buffers:
                buffer.allocate()

    def share(self) -> list[Message]:
        """Handles with which another process can `attach` the buffers, exactly once per call."""
        return [_shared(buffer.bytes.untyped_storage()) for buffer in self._buffers]

    def close(self) -> None:
        """Return the memory to torch's allocator. The other processes must have detached."""
        for buffer in self._buffers:
            buffer.release()
        # Blocks that a dead process did not detach.
        torch.cuda.ipc_collect()


class HostStaging:
    """Buffers in host memory; see `DeviceStaging`."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._files: list[int] = []
        self._buffers: list[Tensor] = []
        self.open()

    @property
    def buffers(self) -> list[Tensor]:
        return self._buffers

    def open(self) -> None:
        if not self._buffers:
            for nbytes in self._sizes:
                self._files.append(os.memfd_create("dagrl-weights"))
                os.truncate(self._files[-1], nbytes)
                self._buffers.append(_mapped(self._files[-1], nbytes))

    def share(self) -> list[Message]:
        named = [f"/proc/{os.getpid()}/fd/{file}" for file in self._files]
        return [{"file": file, "nbytes": nbytes} for file, nbytes in zip(named, self._sizes, strict=True)]

    def close(self) -> None:
        """Free the memory as soon as the other processes have detached."""
        for file in self._files:
            os.close(file)
        self._files, self._buffers = [], []


Staging = DeviceStaging | HostStaging


def staging_on(device: torch.device, manifest: Manifest) -> Staging:
    """Alternating buffers for the buckets of `manifest`."""
    # With a single bucket the second buffer would be empty, and empty memory cannot be shared.
    sizes = [nbytes for nbytes in manifest.buffer_sizes(BUFFERS) if nbytes]
    return DeviceStaging(sizes, device) if device.type == "cuda" else HostStaging(sizes)


def attach(shared: Message, device: torch.device) -> Tensor:
    """Another process's buffer, uint8 [bytes]; drop it before that process frees the memory.

    `device` is this process's GPU. Raises ValueError if the buffer cannot be opened from this process.
    """
    if "file" in shared:
        try:
            with Path(shared["file"]).open("r+b") as file:
                return _mapped(file.fileno(), shared["nbytes"])
        except OSError as error:
            raise ValueError(f"this process cannot open the sender's memory: {error}") from error
    handle, counter, event = (bytes.fromhex(shared[key]) for key in ("handle", "counter", "event"))
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index, handle, shared["nbytes"], shared["offset"], counter, shared["count"], event, shared["waits"]
        )
    except RuntimeError as error:
        raise ValueError(
            f"CUDA IPC cannot open the sender's memory on this GPU: {first_line(error)}; "
            "choose weight_sync.route: broadcast or object_store"
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def gpu_name(device: torch.device) -> str:
    """UUID of the GPU; empty for the CPU."""
    return "" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def _shared(storage: torch.UntypedStorage) -> Message:
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
    # The tensor keeps the mapping alive, also after the file is closed.
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)


@contextmanager
def _sharable_memory() -> Iterator[None]:
    """Turn off expandable segments, which other processes cannot open, if torch is configured to use them."""
    setting = next((os.environ[name] for name in _SETTINGS if _EXPANDABLE in os.environ.get(name, "")), None)
    if setting is None or not torch.cuda.is_available():
        yield
        return
    torch.cuda.memory._set_allocator_settings(setting.replace(_EXPANDABLE, "expandable_segments:False"))
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings(setting)
