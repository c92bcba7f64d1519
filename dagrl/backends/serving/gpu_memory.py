"""Queries the driver for the names and the memory of GPUs. torch would allocate some of that memory for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one GPU in GiB, of all processes."""

    gpu: str
    free_gib: float
    total_gib: float

    @property
    def used_gib(self) -> float:
        return self.total_gib - self.free_gib

    def __str__(self) -> str:
        return f"GPU {self.gpu} had {self.free_gib:.1f} of {self.total_gib:.1f} GiB free"


def gpu_memory(gpus: Sequence[str]) -> list[GpuMemory]:
    """Free and total memory of `gpus`, named as in CUDA_VISIBLE_DEVICES; empty if the driver does not report it."""

    def memory(library: ModuleType, gpu: str, handle: object) -> GpuMemory:
        reading = library.nvmlDeviceGetMemoryInfo(handle)
        return GpuMemory(gpu, reading.free / _GIB, reading.total / _GIB)

    return _readings(gpus, memory)


def gpu_names(gpus: Sequence[str]) -> list[str]:
    """The driver's names of `gpus`, such as "NVIDIA H200"; empty if it does not report them."""
    return _readings(gpus, lambda library, _, handle: str(library.nvmlDeviceGetName(handle)))


def _readings[Reading](gpus: Sequence[str], read: Callable[[ModuleType, str, object], Reading]) -> list[Reading]:
    """Call `read` with the driver's library, a GPU and its handle for each GPU; returns nothing without a driver."""
    if not gpus or importlib.util.find_spec("pynvml") is None:
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return [read(pynvml, gpu, _handle(pynvml, gpu)) for gpu in gpus]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []


def _handle(library: ModuleType, gpu: str) -> object:
    if gpu.isdecimal():
        return library.nvmlDeviceGetHandleByIndex(int(gpu))
    return library.nvmlDeviceGetHandleByUUID(gpu.encode())
