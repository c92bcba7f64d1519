"""Host memory pinned for GPUs, there in a fraction of the time that the driver needs to take it itself.

`cudaHostAlloc`, which is torch's `pin_memory=True`, brings one small page after the other, under the driver's lock.
Here threads bring huge pages, where the kernel has them, and the driver pins what is there. Torch can be told to do the
like (`pinned_use_cuda_host_register`), but then for every pinned tensor of the process, however small, and with memory
that a fork copies.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch

_GIB = 2**30
_MOST_THREADS = 16
"""More wait for the memory, not for a core; each GPU of a machine has a process that takes its own."""


def add_pinned(blocks: list[torch.Tensor], count: int, nbytes: int) -> None:
    """Append `count` blocks, uint8 [nbytes] of zeros each, that this process's GPU copies from and to by itself.

    The caller has to `unpin` them before it lets go of them. OSError where the machine does not give so much; `blocks`
    has what it gave before.
    """
    threads = min(_MOST_THREADS, count, len(os.sched_getaffinity(0)))
    try:
        with ThreadPoolExecutor(threads, "dagrl-pin") as pool:
            for block in pool.map(_block_in_memory, itertools.repeat(nbytes, count)):
                _pin(block)
                blocks.append(block)
    except OSError as error:
        raise OSError(
            f"{count * nbytes / _GIB:.1f} GiB of the host's memory cannot be pinned for what leaves the GPU: {error}; "
            "look at free memory (`free -g`), the container's limit of it, and the limit of locked memory (`ulimit -l`)"
        ) from error


def unpin(blocks: list[torch.Tensor]) -> None:
    """Take the driver's hand off blocks of `add_pinned`, all that was copied from and to them being over."""
    # A GPU that has failed copies nothing any more.
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
    for block in blocks:
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())


def _block_in_memory(nbytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without huge pages refuses, and has small ones.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # A fork would copy all that is pinned, at once.
    memory.madvise(mmap.MADV_DONTFORK)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    # A write brings a page. Torch lets other threads run meanwhile.
    block[:: mmap.PAGESIZE].zero_()
    return block


def _pin(block: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()
    error = cudart.cudaHostRegister(block.data_ptr(), block.nbytes, 0)
    if error != cudart.cudaError.success:
        raise OSError(f"cudaHostRegister says {cudart.cudaGetErrorString(error)!r}")
