"""Collectives of a group that has one rank: what comes out is what went in, and nobody has to be reached for it.

Megatron makes a group for each kind of parallelism and calls collectives on those of one rank, too. NCCL would keep a
communicator on the device for each, and launch kernels that copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

Tensors = Sequence[torch.Tensor]


class SingleRankCollectives:
    """Comes before a kind of ProcessGroup, which is left with points that send to themselves."""

    def allreduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        """Nothing to add."""
        return _done(opts)

    allreduce_coalesced = reduce = broadcast = allreduce

    def barrier(self, opts: Any = None) -> dist.Work:
        """All are there."""
        return _done(opts)

    def _allgather_base(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> dist.Work:
        return _copied([output], [mine], opts)

    _reduce_scatter_base = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Tensors, mine: Tensors, opts: Any = None) -> dist.Work:
        """Copies."""
        return _copied(outputs, mine, opts)

    reduce_scatter_tensor_coalesced = alltoall = allgather_into_tensor_coalesced

    def alltoall_base(
        self, output: torch.Tensor, mine: torch.Tensor, output_sizes: Any, sizes: Any, opts: Any = None
    ) -> dist.Work:
        """A copy."""
        return _copied([output], [mine], opts)

    def allgather(self, outputs: Sequence[Tensors], mine: Tensors, opts: Any = None) -> dist.Work:
        """Copies, each into a list of one."""
        return _copied([output for (output,) in outputs], mine, opts)

    gather = allgather

    def reduce_scatter(self, outputs: Tensors, mine: Sequence[Tensors], opts: Any = None) -> dist.Work:
        """Copies, each out of a list of one."""
        return _copied(outputs, [tensor for (tensor,) in mine], opts)

    scatter = reduce_scatter

    def _start_coalescing(self, device: torch.device) -> None:
        """What comes is done at once."""

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return _done(None)


def _copied(outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
    for output, tensor in zip(outputs, inputs, strict=True):
        # Often a share of a buffer that is gathered in its place.
        if output.data_ptr() != tensor.data_ptr():
            output.view(-1).copy_(tensor.reshape(-1))
    return _done(opts)


def _done(opts: Any) -> dist.Work:
    """On a GPU: queued on the current stream, which is where it is waited for."""
    if getattr(opts, "reduceOp", None) == dist.ReduceOp.PREMUL_SUM:
        raise NotImplementedError("a sum with a factor, which only Megatron's FSDP asks for, is none for one rank here")
    over: torch.futures.Future[None] = torch.futures.Future()
    over.set_result(None)
    return _create_work_from_future(over)
