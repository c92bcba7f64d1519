"""Brings the parts of a bucket of tensors from the ranks that hold them to rank 0, whatever the layout.

Every rank knows by the `weight_plan` what each of them sends, so only bytes travel: first within a pipeline stage, over
its tensor-parallel ranks and over those that share its experts, then from stage to stage; each once a bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from dagrl.engines.megatron.weight_plan import PlannedTensor

_ALIGNMENT = 16
"""Bytes that each part begins at a multiple of, so that it can be looked at in its own dtype."""


class Gatherer:
    """One rank's share in gathering; collective: each rank makes one and calls it for the same buckets."""

    def __init__(self, held: Mapping[str, Tensor]) -> None:
        """`held` are this rank's parts by Megatron's names. Parameters have one dtype, the same on all ranks."""
        self._held = held
        some = next(tensor for tensor in held.values() if isinstance(tensor, torch.nn.Parameter))
        self._device, self._dtype = some.device, some.dtype
        self._is_root = dist.get_rank() == 0
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._dense = _Team(
            parallel_state.get_tensor_model_parallel_group(),
            takes_part=parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
        )
        self._experts = _Team(
            parallel_state.get_expert_tensor_and_model_parallel_group(),
            takes_part=parallel_state.get_expert_data_parallel_rank() == 0,
        )
        # Of each stage, the rank that has gathered: the first of both teams.
        self._pipeline = _Team(
            parallel_state.get_pipeline_model_parallel_group(),
            takes_part=self._dense.takes_part and self._dense.rank == 0,
        )
        assert not self._pipeline.takes_part or (self._experts.takes_part and self._experts.rank == 0)

    def dtype(self, tensor: PlannedTensor) -> torch.dtype:
        """Of the tensor on every rank."""
        return torch.float32 if tensor.mapped.buffer else self._dtype

    def gather(self, bucket: Sequence[PlannedTensor]) -> list[list[Tensor]]:
        """The parts of each tensor, in order, on rank 0; nothing elsewhere. Collective.

        They share memory with each other, or with the model where a part is rank 0's own.
        """
        gathered: dict[str, list[Tensor]] = {}
        mine = [tensor for tensor in bucket if tensor.stage == self._stage]
        for team, tensors in (
            (self._dense, [tensor for tensor in mine if tensor.expert_rank is None]),
            (self._experts, [tensor for tensor in mine if tensor.expert_rank is not None]),
        ):
            if team.takes_part:
                gathered |= self._gather_stage(team, tensors)
        if self._pipeline.takes_part and any(tensor.stage for tensor in bucket):
            gathered = self._gather_stages(bucket, gathered)
        return [gathered[tensor.mapped.megatron] for tensor in bucket] if self._is_root else []

    def _gather_stage(self, team: _Team, tensors: Sequence[PlannedTensor]) -> dict[str, list[Tensor]]:
        """All parts of the stage's tensors, on the team's first rank."""
        senders = [[tensor for tensor in tensors if rank in self._holders(tensor)] for rank in range(team.size)]
        own = [self._held[tensor.mapped.megatron].detach() for tensor in senders[team.rank]]
        parts: list[Sequence[Tensor]] = [own, *([] for _ in range(team.size - 1))]
        if any(senders[1:]):
            # The first rank keeps what it has: sending it to itself would be a copy more.
            sizes = [0, *(sum(map(self._stride, sent)) for sent in senders[1:])]
            received = team.to_first(_packed(own, self._device) if team.rank else None, sizes, self._device)
            parts[1:] = [self._unpacked(block, sent) for block, sent in zip(received[1:], senders[1:], strict=False)]
        if team.rank:
            return {}
        gathered: dict[str, list[Tensor]] = {tensor.mapped.megatron: [] for tensor in tensors}
        for sent, block in zip(senders, parts, strict=True):
            for tensor, part in zip(sent, block, strict=True):
                gathered[tensor.mapped.megatron].append(part)
        return gathered

    def _gather_stages(self, bucket: Sequence[PlannedTensor], own: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """All parts of all stages' tensors, on the first stage."""
        size = self._pipeline.size
        sent = [[t for t in bucket if t.stage == stage for _ in range(t.parts)] for stage in range(size)]
        sizes = [0, *(sum(map(self._stride, tensors)) for tensors in sent[1:])]
        flat = [part for tensor in bucket for part in own.get(tensor.mapped.megatron, ())]
        payload = _packed(flat, self._device) if self._pipeline.rank else None
        received = self._pipeline.to_first(payload, sizes, self._device)
        for block, tensors in zip(received[1:], sent[1:], strict=False):
            for tensor, part in zip(tensors, self._unpacked(block, tensors), strict=True):
                own.setdefault(tensor.mapped.megatron, []).append(part)
        return own

    def _holders(self, tensor: PlannedTensor) -> range:
        """Ranks within the team that a full tensor comes from."""
        if tensor.expert_rank is None:
            return range(tensor.parts)
        # In the team, the ranks that share an expert lie side by side.
        first = tensor.expert_rank * parallel_state.get_expert_tensor_parallel_world_size()
        return range(first, first + tensor.parts)

    def _stride(self, tensor: PlannedTensor) -> int:
        return _aligned(torch.Size(tensor.shape).numel() * self.dtype(tensor).itemsize)

    def _unpacked(self, block: Tensor, tensors: Sequence[PlannedTensor]) -> list[Tensor]:
        parts, start = [], 0
        for tensor in tensors:
            length = torch.Size(tensor.shape).numel() * self.dtype(tensor).itemsize
            parts.append(block[start : start + length].view(self.dtype(tensor)).view(tensor.shape))
            start += _aligned(length)
        return parts


@dataclass(frozen=True, slots=True)
class _Team:
    """Ranks of a process group that gather on their first one."""

    group: dist.ProcessGroup
    takes_part: bool
    """Whether this rank's group is the one that gathers; replicas of it need not."""

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def to_first(self, payload: Tensor | None, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
        """Everyone's bytes, `sizes` of them, on the first rank; nothing elsewhere. Collective over the team."""
        is_first = self.rank == 0
        sent = torch.empty(0, dtype=torch.uint8, device=device) if payload is None else payload
        assert len(sent) == sizes[self.rank], f"rank {self.rank} sends {len(sent)} bytes of {sizes[self.rank]}"
        received = torch.empty(sum(sizes) if is_first else 0, dtype=torch.uint8, device=device)
        taken = list(sizes) if is_first else [0] * self.size
        given = [len(sent), *[0] * (self.size - 1)]
        # Of all collectives only this takes parts of any size on NCCL and on gloo.
        dist.all_to_all_single(received, sent, taken, given, group=self.group)
        return list(received.split(taken)) if is_first else []


def _packed(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Their bytes, one behind the other."""
    lengths = [part.nbytes for part in parts]
    packed = torch.empty(sum(map(_aligned, lengths)), dtype=torch.uint8, device=device)
    start = 0
    for part, length in zip(parts, lengths, strict=True):
        packed[start : start + length].view(part.dtype).copy_(part.flatten())
        start += _aligned(length)
    return packed


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
