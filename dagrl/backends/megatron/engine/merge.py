"""Weights with their low-rank adapters added, for `export`: a bucket at a time, so that a sync needs little memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from dagrl.backends.megatron.engine.weight_plan import PlannedTensor
from dagrl.backends.megatron.lora import LoraSpec, adapters
from dagrl.weight_sync.staging import ReleasableBuffer

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class _Merge:
    """One adapted weight of this rank."""

    base: Tensor
    a: Tensor
    b: Tensor
    group: dist.ProcessGroup
    """The ranks that share the layer."""
    target: Tensor

    def run(self, scale: float) -> None:
        a, b = self.a, self.b
        # Megatron-bridge cuts the side of an adapter that its base has whole.
        if len(a) != b.shape[1]:
            a = _gathered(a, self.group)
        if len(b) != len(self.base):
            b = _gathered(b, self.group)
        # One rounding: the product is added before the result takes the weights' dtype.
        torch.addmm(self.base, b, a, alpha=scale, out=self.target)


class Merger:
    """Keeps a rank's merged weights of one bucket at a time."""

    def __init__(
        self,
        held: Mapping[str, Tensor],
        held_adapters: Mapping[str, Tensor],
        buckets: Sequence[Sequence[PlannedTensor]],
        lora: LoraSpec,
    ) -> None:
        """`held` are this rank's own weights and `held_adapters` the tensors of its adapters, by Megatron's names."""
        self._scale = lora.scale
        some = next(iter(held_adapters.values()))
        found = [
            [(tensor, adapter) for tensor in bucket if (adapter := next(adapters([tensor.mapped], lora), None))]
            for bucket in buckets
        ]
        mine = [[pair for pair in pairs if pair[0].mapped.megatron in held and _is_sent(pair[0])] for pairs in found]
        sizes = [[_aligned(held[tensor.mapped.megatron].nbytes) for tensor, _ in pairs] for pairs in mine]
        self._buffer = ReleasableBuffer(max(map(sum, sizes), default=0), some.device)
        self._merges: list[list[_Merge]] = []
        self.merged: dict[str, Tensor] = dict(held)
        """`held` with the places of the merged weights, which are valid after `merge` of their bucket."""
        dense = parallel_state.get_tensor_model_parallel_group()
        expert = parallel_state.get_expert_tensor_parallel_group()
        for pairs, nbytes in zip(mine, sizes, strict=True):
            blocks = self._buffer.bytes[: sum(nbytes)].split(nbytes) if nbytes else []
            merges = []
            for (tensor, adapter), block in zip(pairs, blocks, strict=True):
                base = held[tensor.mapped.megatron].detach()
                target = block[: base.nbytes].view(base.dtype).view(base.shape)
                self.merged[tensor.mapped.megatron] = target
                a, b = (held_adapters[part.megatron].detach() for part in (adapter.a, adapter.b))
                group = dense if tensor.expert_rank is None else expert
                merges.append(_Merge(base, a, b, group, target))
            self._merges.append(merges)

    def allocate(self) -> None:
        self._buffer.allocate()

    def release(self) -> None:
        self._buffer.release()

    def merge(self, index: int) -> None:
        """Merge the weights of a bucket. Collective over the ranks that share a layer."""
        for each in self._merges[index]:
            each.run(self._scale)


def _is_sent(tensor: PlannedTensor) -> bool:
    """Whether this rank's replica is the one whose weights are gathered."""
    if tensor.expert_rank is None:
        return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)
    return bool(parallel_state.get_expert_data_parallel_rank() == 0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks, one below the other."""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)
