"""Free memory of GPUs, asked from the driver: torch would use some of it to find out."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one GPU in GiB, of all processes."""

    gpu: str
    free_gib: float
    total_gib: float

    @property
    def used_gib(self) -> float:
        """Used memory."""
        return self.total_gib - self.free_gib

    def __str__(self) -> str:
        return f"GPU {self.gpu} had {self.free_gib:.1f} of {self.total_gib:.1f} GiB free"


def gpu_memory(gpus: Sequence[str]) -> list[GpuMemory]:
    """Memory of `gpus`, named as in CUDA_VISIBLE_DEVICES; empty if the driver does not report it."""
    if not gpus or importlib.util.find_spec("pynvml") is None:
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return [_of(gpu) for gpu in gpus]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []


def _of(gpu: str) -> GpuMemory:
    import pynvml

    handle = (
        pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
        if gpu.isdecimal()
        else pynvml.nvmlDeviceGetHandleByUUID(gpu.encode())
    )
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuMemory(gpu, memory.free / _GIB, memory.total / _GIB)
