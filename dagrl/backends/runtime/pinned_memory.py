"""Allocates pinned host memory for GPUs much faster than the driver does.

`cudaHostAlloc`, used by torch's `pin_memory=True`, maps small pages one by one under the driver's lock. Here threads
map huge pages, if the kernel has them, and the driver pins them afterwards. Torch has a similar setting
(`pinned_use_cuda_host_register`), but it applies to every pinned tensor of the process, and its memory is copied by
forks.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

_GIB = 2**30
_COPY_BYTES = 2**28
_PIECE_BYTES = 2**25
"""Bytes that are copied before the next copies start. Other processes' copies from the same GPU, such as the tokens
that a server has sampled, wait for all copies queued before them: 0.6 ms in place of seconds."""
_ALIGNMENT = 256
_MOST_THREADS = 16
"""Threads wait for memory rather than for cores; each GPU of a machine has a process that allocates."""


def add_pinned(blocks: list[torch.Tensor], count: int, nbytes: int) -> None:
    """Append `count` zeroed blocks, uint8 [nbytes], pinned for this process's GPU.

    The caller must `unpin` them before dropping them. Raises OSError if the memory is not available; `blocks` then has
    the allocated ones.
    """
    if count == 0:
        return
    threads = min(_MOST_THREADS, count, len(os.sched_getaffinity(0)))
    try:
        with ThreadPoolExecutor(threads, "dagrl-pin") as pool:
            for block in pool.map(_block_in_memory, itertools.repeat(nbytes, count)):
                _pin(block)
                blocks.append(block)
    except OSError as error:
        raise OSError(
            f"cannot pin {count * nbytes / _GIB:.1f} GiB of host memory for the contents of a GPU: {error}; "
            "check free memory (`free -g`), the container's memory limit, and the limit of locked memory (`ulimit -l`)"
        ) from error


def unpin(blocks: list[torch.Tensor]) -> None:
    """Unpin blocks of `add_pinned`, after all copies from and to them."""
    # After an error of the GPU there are no copies.
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
    for block in blocks:
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())


class PinnedCopies:
    """Copies of a GPU's tensors in pinned memory, which stays for the next copies."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._block_bytes = 0

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of tensors of one GPU, in their order and in place of earlier ones; complete on return, in any thread.

        The tensors must have their values already: the copies do not wait for kernels. Raises OSError as `add_pinned`,
        with nothing left.
        """
        places, block, end = [], 0, 0
        size = max([_COPY_BYTES, self._block_bytes, *(_aligned(tensor.nbytes) for tensor in tensors)])
        for tensor in tensors:
            if end + tensor.nbytes > size:
                block, end = block + 1, 0
            places.append((block, end))
            end += _aligned(tensor.nbytes)
        # A thread begins on the first GPU.
        with torch.cuda.device(tensors[0].device):
            if not self._block_bytes:
                # At interpreter exit the driver unpins it.
                weakref.finalize(self, unpin, self._blocks).atexit = False
            if size > self._block_bytes:
                self._release()
                self._block_bytes = size
            try:
                add_pinned(self._blocks, max(0, block + 1 - len(self._blocks)), size)
            except OSError:
                self._release()
                raise
            copies = [
                _part(self._blocks[block], start, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
                for tensor, (block, start) in zip(tensors, places, strict=True)
            ]
            _copy_in_pieces(copies, tensors)
        return copies

    def _release(self) -> None:
        unpin(self._blocks)
        self._blocks.clear()


def _copy_in_pieces(copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    # The copies must not wait for kernels that another thread queues meanwhile.
    stream = torch.cuda.Stream()
    queued = 0
    with torch.cuda.stream(stream):
        for copy, tensor in zip(copies, tensors, strict=True):
            length = max(1, _PIECE_BYTES // tensor.element_size())
            # A copy of a tensor that is not contiguous makes one that is on the GPU first.
            for into, piece in zip(copy.view(-1).split(length), tensor.reshape(-1).split(length), strict=True):
                into.copy_(piece, non_blocking=True)
                queued += piece.nbytes
                if queued >= _PIECE_BYTES:
                    stream.synchronize()
                    queued = 0
    stream.synchronize()


def _part(block: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """Bytes of a block with a separate storage, because `torch.save` writes the whole storage of a view."""
    if nbytes == 0:
        return block.new_empty(0)
    return torch.frombuffer(block.numpy(), dtype=torch.uint8, count=nbytes, offset=start)


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGNMENT


def _block_in_memory(nbytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Fails on a kernel without huge pages, which uses small ones.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # A fork would copy all pinned memory at once.
    memory.madvise(mmap.MADV_DONTFORK)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    # Writing maps a page; torch releases the GIL meanwhile.
    block[:: mmap.PAGESIZE].zero_()
    return block


def _pin(block: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()
    error = cudart.cudaHostRegister(block.data_ptr(), block.nbytes, 0)
    if error != cudart.cudaError.success:
        raise OSError(f"cudaHostRegister failed with {cudart.cudaGetErrorString(error)!r}")
