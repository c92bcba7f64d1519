"""Gathers the parts of a bucket of tensors on one rank, from any layout.

The `weight_plan` tells every rank the tensors that each rank sends, so only bytes are sent: first within a pipeline
stage, over its tensor-parallel ranks and over its expert-parallel ranks, then between stages; once per bucket. If each
owner gathers its own buckets, only the ranks that split its tensors take part. The plan is made at a bucket's first
use, so that later ones take a few calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from dagrl.backends.megatron.engine.weight_plan import PlannedTensor, owner_of
from dagrl.backends.megatron.lora import LoraSpec, adapters
from dagrl.weight_sync.copies import CopyPlan
from dagrl.weight_sync.staging import ReleasableBuffer

_ALIGNMENT = 16
"""Alignment of each part in bytes, so that it can be viewed in its own dtype."""


class Gatherer:
    """One rank's part in gathering; all ranks make one and call it for the same buckets."""

    def __init__(
        self, held: Mapping[str, Tensor], buckets: Sequence[Sequence[PlannedTensor]], *, by_owner: bool = False
    ) -> None:
        """`held` are this rank's parts by Megatron's names. Parameters have one dtype, the same on all ranks.

        Rank 0 gathers all buckets, or with `by_owner` the `owner_of` the tensors of each.
        """
        self._held, self._buckets, self._by_owner = held, buckets, by_owner
        some = next(tensor for tensor in held.values() if isinstance(tensor, torch.nn.Parameter))
        self._device, self._dtype = some.device, some.dtype
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._expert_rank = parallel_state.get_expert_model_parallel_rank()
        self._dense = _Team(
            parallel_state.get_tensor_model_parallel_group(),
            takes_part=parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
        )
        self._experts = _Team(
            parallel_state.get_expert_tensor_parallel_group()
            if by_owner
            else parallel_state.get_expert_tensor_and_model_parallel_group(),
            takes_part=parallel_state.get_expert_data_parallel_rank() == 0,
        )
        # Per stage, the rank that has gathered: the first of both teams.
        self._pipeline = _Team(
            parallel_state.get_pipeline_model_parallel_group(),
            takes_part=not by_owner and self._dense.takes_part and self._dense.rank == 0,
        )
        assert not self._pipeline.takes_part or (self._experts.takes_part and self._experts.rank == 0)
        exchanges = [list(self._exchanges(bucket)) for bucket in buckets]
        self._sent = ReleasableBuffer(
            max((exchange.sent for bucket in exchanges for exchange in bucket), default=0), self._device
        )
        received = (sum(exchange.received for exchange in bucket) for bucket in exchanges)
        self._received = ReleasableBuffer(max(received, default=0), self._device)
        self._planned: dict[int, tuple[list[_Hop], list[list[Tensor]]]] = {}
        """Bucket -> its exchanges with their buffers, and the gathered parts."""

    def allocate(self) -> None:
        self._sent.allocate()
        self._received.allocate()

    def release(self) -> None:
        self._sent.release()
        self._received.release()

    def gather(self, index: int) -> list[list[Tensor]]:
        """The parts of each tensor of a bucket in order on its owner; nothing elsewhere. Collective.

        They are the same views at each call, overwritten by the next bucket; the owner's own are the model's.
        """
        if index not in self._planned:
            self._planned[index] = self._plan(self._buckets[index])
        hops, parts = self._planned[index]
        for hop in hops:
            hop.run()
        return parts

    def _exchanges(self, bucket: Sequence[PlannedTensor]) -> Iterator[_Exchange]:
        mine = [tensor for tensor in bucket if tensor.stage == self._stage]
        if self._by_owner:
            mine = [tensor for tensor in mine if tensor.expert_rank in (None, self._expert_rank)]
        for team, tensors in (
            (self._dense, [tensor for tensor in mine if tensor.expert_rank is None]),
            (self._experts, [tensor for tensor in mine if tensor.expert_rank is not None]),
        ):
            if team.takes_part:
                senders = [[tensor for tensor in tensors if rank in self._holders(tensor)] for rank in range(team.size)]
                yield _Exchange(team, senders, self._bytes_sent(senders))
        if self._pipeline.takes_part and any(tensor.stage for tensor in bucket):
            stages = range(self._pipeline.size)
            senders = [[t for t in bucket if t.stage == stage for _ in range(t.parts)] for stage in stages]
            yield _Exchange(self._pipeline, senders, self._bytes_sent(senders))

    def _plan(self, bucket: Sequence[PlannedTensor]) -> tuple[list[_Hop], list[list[Tensor]]]:
        hops = []
        gathered: dict[str, list[Tensor]] = {}
        begin = 0
        for exchange in self._exchanges(bucket):
            team = exchange.team
            if team is self._pipeline:
                own = [part for tensor in bucket for part in gathered.get(tensor.mapped.megatron, ())]
            else:
                own = [self._held[tensor.mapped.megatron].detach() for tensor in exchange.senders[team.rank]]
            received = self._received.bytes[begin : begin + exchange.received]
            begin += exchange.received
            if any(exchange.senders[1:]):
                hops.append(self._hop(exchange, own, received))
            if team.rank == 0:
                blocks = received.split(exchange.taken)
                for sender, (tensors, block) in enumerate(zip(exchange.senders, blocks, strict=True)):
                    parts = self._unpacked(block, tensors) if sender else own
                    if team is self._pipeline and not sender:
                        continue  # Already gathered.
                    for tensor, part in zip(tensors, parts, strict=True):
                        gathered.setdefault(tensor.mapped.megatron, []).append(part)
        is_owner = dist.get_rank() == (owner_of(bucket[0]) if self._by_owner else 0)
        return hops, [gathered[tensor.mapped.megatron] for tensor in bucket] if is_owner else []

    def _hop(self, exchange: _Exchange, own: Sequence[Tensor], received: Tensor) -> _Hop:
        sent = self._sent.bytes[: exchange.sent]
        # The first rank keeps its own parts: sending them to itself would be another copy.
        places = self._unpacked(sent, exchange.senders[exchange.team.rank]) if exchange.team.rank else []
        pack = CopyPlan(zip(places, own if places else [], strict=True))
        given = [exchange.sent, *[0] * (exchange.team.size - 1)]
        return _Hop(exchange.team.group, pack, sent, received, exchange.taken, given)

    def _holders(self, tensor: PlannedTensor) -> range:
        if tensor.expert_rank is None or self._by_owner:
            return range(tensor.parts)
        # Ranks of a team that share an expert are consecutive.
        first = tensor.expert_rank * parallel_state.get_expert_tensor_parallel_world_size()
        return range(first, first + tensor.parts)

    def _bytes_sent(self, senders: Sequence[Sequence[PlannedTensor]]) -> list[int]:
        return [0, *(sum(map(self._stride, tensors)) for tensors in senders[1:])]

    def _stride(self, tensor: PlannedTensor) -> int:
        return _aligned(self._nbytes(tensor))

    def _nbytes(self, tensor: PlannedTensor) -> int:
        return torch.Size(tensor.shape).numel() * tensor.dtype(self._dtype).itemsize

    def _unpacked(self, block: Tensor, tensors: Sequence[PlannedTensor]) -> list[Tensor]:
        parts, start = [], 0
        for tensor in tensors:
            piece = block[start : start + self._nbytes(tensor)]
            parts.append(piece.view(tensor.dtype(self._dtype)).view(tensor.shape))
            start += self._stride(tensor)
        return parts


@dataclass(frozen=True, slots=True)
class _Team:
    """Ranks of a process group that gather on their first one."""

    group: dist.ProcessGroup
    takes_part: bool
    """Whether this rank's group gathers; replicas do not."""

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Tensors that the ranks of a team send to its first one."""

    team: _Team
    senders: list[list[PlannedTensor]]
    """Tensors of each rank, in the order of its bytes."""
    nbytes: list[int]
    """Bytes that each rank sends; 0 for the first, which keeps its own."""

    @property
    def sent(self) -> int:
        return self.nbytes[self.team.rank]

    @property
    def taken(self) -> list[int]:
        return self.nbytes if self.team.rank == 0 else [0] * self.team.size

    @property
    def received(self) -> int:
        return sum(self.taken)


@dataclass(frozen=True, slots=True)
class _Hop:
    group: dist.ProcessGroup
    pack: CopyPlan
    sent: Tensor
    received: Tensor
    taken: list[int]
    given: list[int]

    def run(self) -> None:
        self.pack.run()
        # The only collective with parts of any size on both NCCL and gloo.
        dist.all_to_all_single(self.received, self.sent, self.taken, self.given, group=self.group)


@dataclass(frozen=True, slots=True)
class _Merge:
    base: Tensor
    a: Tensor
    b: Tensor
    group: dist.ProcessGroup
    """The ranks that share the layer."""
    target: Tensor

    def run(self, scale: float) -> None:
        a, b = self.a, self.b
        # Megatron-bridge splits the side of an adapter that its base holds whole.
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
        mine = [
            [
                (tensor, adapter)
                for tensor in bucket
                if tensor.mapped.megatron in held and _is_sent(tensor)
                for adapter in adapters([tensor.mapped], lora)
            ]
            for bucket in buckets
        ]
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
        for weight in self._merges[index]:
            weight.run(self._scale)


def _is_sent(tensor: PlannedTensor) -> bool:
    """Whether this rank's replica is the one whose weights are gathered."""
    if tensor.expert_rank is None:
        return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    return parallel_state.get_expert_data_parallel_rank() == 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)
