"""Megatron's distributed optimizer in a checkpoint: each rank saves and loads the states that it holds.

Megatron's own ``fully_reshardable`` format gathers all states on the host of one data-parallel rank, four copies on the
way, and loads all of them on each rank. The folders are the same: a tensor for each parameter and state.

The ranks of a data-parallel group share a bucket of parameters in pieces of equal size, which split few parameters. The
rank with the first piece of a parameter saves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_CHUNK = 2**26
"""Elements of a piece in one message."""

States = dict[str, torch.Tensor]
"""Name of a state, such as ``exp_avg`` -> its values."""


@contextmanager
def held_states(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Context in which `optimizer.sharded_state_dict` holds the states that this rank saves, or needs when loading."""
    optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    parts = [part for part in optimizers if isinstance(part, DistributedOptimizer)]
    for part in parts:
        part.sharded_param_state_fully_reshardable = partial(_sharded_states, part)
    try:
        yield
    finally:
        for part in parts:
            del part.sharded_param_state_fully_reshardable


def _sharded_states(
    part: DistributedOptimizer, model: ShardedStateDict, is_loading: bool = False, metadata: object = None
) -> dict[int, ShardedStateDict]:
    """Number of a parameter -> state -> description with its values, by the numbers that Megatron loads by."""
    tensors, _ = extract_sharded_tensors_and_factories(model)
    descriptions = {tensor.data: tensor for tensor in nested_values(tensors)}
    sharded: dict[int, ShardedStateDict] = {}
    rank = part.data_parallel_group.rank()
    for number, (parameter, bucket, place) in enumerate(_parameters(part)):
        description = descriptions[parameter]
        pieces = [_piece_of(part, bucket, place, holder) for holder in range(part.data_parallel_group.size())]
        held = pieces[rank]
        states = _flat_states(part, parameter) if held is not None else {}
        saves = rank == _first(pieces)
        if held == place:
            whole = states
        elif is_loading:
            # Megatron selects the rank's piece.
            whole = {name: torch.empty(len(place), dtype=values.dtype) for name, values in states.items()}
        else:
            whole = _gathered(part, place, pieces, states)
        # Megatron counts a tensor once, on the replica whose last number is 0.
        replica = (*description.replica_id[:2], part.distributed_optimizer_instance_id if saves else rank + 1)
        if whole:
            sharded[number] = {
                name: _described(description, name, values.view(description.data.shape), replica)
                for name, values in whole.items()
            }
    return sharded


def _described(
    description: ShardedTensor | ShardedTensorFactory, state: str, values: torch.Tensor, replica: tuple[int, ...]
) -> ShardedTensor | ShardedTensorFactory:
    dtype = {} if isinstance(description, ShardedTensorFactory) else {"dtype": values.dtype}
    key = f"optimizer.state.{state}.{description.key}"
    return replace(description, key=key, data=values, replica_id=replica, **dtype)


def _parameters(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, _ParamAndGradBucket, range]]:
    for buffer in part.buffers:
        for parameter, (start, end, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            yield parameter, bucket, range(start - bucket.offset, end - bucket.offset)


def _piece_of(part: DistributedOptimizer, bucket: _ParamAndGradBucket, place: range, rank: int) -> range | None:
    """Elements of `place` that a rank of the data-parallel group holds."""
    size = bucket.grad_data.numel() // part.data_parallel_group.size()
    piece = range(max(place.start, rank * size), min(place.stop, (rank + 1) * size))
    return piece if len(piece) else None


def _first(pieces: Sequence[range | None]) -> int:
    return next(rank for rank, piece in enumerate(pieces) if piece is not None)


def _flat_states(part: DistributedOptimizer, parameter: torch.nn.Parameter) -> States:
    """The states of a rank's piece of a parameter; without the step, which is among the optimizer's options."""
    states = part._get_main_param_and_optimizer_states(parameter)
    return {name: values.detach().view(-1) for name, values in states.items() if name != "step"}


def _gathered(part: DistributedOptimizer, place: range, pieces: Sequence[range | None], states: States) -> States:
    """All of a parameter's states, in host memory, on the rank with its first piece; nothing on others. Collective."""
    group, rank = part.data_parallel_group, part.data_parallel_group.rank()
    held = {holder: piece for holder, piece in enumerate(pieces) if piece is not None}
    if len(held) == 1:
        return {}
    gathered: States = {}
    for name in ("param", *part.optimizer_state_keys):
        whole = torch.empty(len(place)) if rank == min(held) else None
        for holder, piece in held.items():
            for start in range(piece.start, piece.stop, _CHUNK):
                chunk = range(start, min(start + _CHUNK, piece.stop))
                own = states[name][chunk.start - piece.start :] if rank == holder else None
                values = _sent(group, holder, own, chunk)
                if whole is not None:
                    whole[chunk.start - place.start : chunk.stop - place.start] = values
        if whole is not None:
            gathered[name] = whole
    return gathered


def _sent(group: dist.ProcessGroup, holder: int, values: torch.Tensor | None, chunk: range) -> torch.Tensor:
    """A chunk of float32 values of one rank, on all ranks of the group."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if values is not None:
        sent = values[: len(chunk)].to(device, torch.float32).contiguous()
    else:
        sent = torch.empty(len(chunk), device=device)
    dist.broadcast(sent, group=group, group_src=holder)
    return sent
