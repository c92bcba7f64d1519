"""Collectives of a process group with one rank, which need no communication.

Megatron makes a group for each kind of parallelism and calls collectives also on those of one rank. NCCL would keep a
communicator on the device for each, and launch copy kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

Tensors = Sequence[torch.Tensor]


class SingleRankCollectives:
    """Mixin before a ProcessGroup class, which then only handles point-to-point operations."""

    def allreduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        return _done(opts)

    allreduce_coalesced = reduce = broadcast = allreduce

    def barrier(self, opts: Any = None) -> dist.Work:
        return _done(opts)

    def _allgather_base(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> dist.Work:
        return _copied([output], [mine], opts)

    _reduce_scatter_base = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Tensors, mine: Tensors, opts: Any = None) -> dist.Work:
        return _copied(outputs, mine, opts)

    reduce_scatter_tensor_coalesced = alltoall = allgather_into_tensor_coalesced

    def alltoall_base(
        self, output: torch.Tensor, mine: torch.Tensor, output_sizes: Any, sizes: Any, opts: Any = None
    ) -> dist.Work:
        return _copied([output], [mine], opts)

    def allgather(self, outputs: Sequence[Tensors], mine: Tensors, opts: Any = None) -> dist.Work:
        return _copied([output for (output,) in outputs], mine, opts)

    gather = allgather

    def reduce_scatter(self, outputs: Tensors, mine: Sequence[Tensors], opts: Any = None) -> dist.Work:
        return _copied(outputs, [tensor for (tensor,) in mine], opts)

    scatter = reduce_scatter

    def _start_coalescing(self, device: torch.device) -> None:
        """Do nothing: operations are immediate."""

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return _done(None)


def _copied(outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
    for output, tensor in zip(outputs, inputs, strict=True):
        # Often a share of a buffer that is gathered in its place.
        if output.data_ptr() != tensor.data_ptr():
            output.view(-1).copy_(tensor.reshape(-1))
    return _done(opts)


def _done(opts: Any) -> dist.Work:
    """A finished work; on a GPU the copies are queued on the current stream, which is the one that waits."""
    if getattr(opts, "reduceOp", None) == dist.ReduceOp.PREMUL_SUM:
        raise NotImplementedError("PREMUL_SUM, which only Megatron's FSDP uses, is not supported for one rank")
    over: torch.futures.Future[None] = torch.futures.Future()
    over.set_result(None)
    return _create_work_from_future(over)
