"""Hugging Face weights into a Megatron model, and out of it again, tensor by tensor.

`families` names the tensors and `tensor_maps` does the arithmetic; here is what moves: every rank cuts its own part out
of a full tensor when loading, and rank 0 collects the parts when exporting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from torch import Tensor

from dagrl.engines.base import Bucket
from dagrl.engines.megatron.families import MappedTensor, tensors
from dagrl.engines.megatron.model import padded_vocab_size, unwrap
from dagrl.engines.model_source import WeightSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DERIVED = ("rotary_emb.inv_freq",)
"""Ends of names that old weight files hold although the config says it all."""


@torch.no_grad()
def load_hf_weights(chunks: Sequence[torch.nn.Module], hf_config: PretrainedConfig, source: WeightSource) -> None:
    """Set every parameter of the model from `source`, in the parameters' own dtype; one full tensor is held at a time.

    Raises ValueError where a tensor is missing, has another shape than the config says, or is not part of the model.
    """
    part, parts = _tensor_parallel_place()
    pairs = _parameters(chunks, hf_config)
    _check_names(pairs, hf_config, source)
    for mapped, parameter in pairs:
        shapes = _hf_shapes(mapped, parameter)
        for name, shape in zip(mapped.hf, shapes, strict=True):
            if source.shape(name) != shape:
                raise ValueError(f"tensor {name!r} is {list(source.shape(name))}, but its config says {list(shape)}")
        parameter.copy_(mapped.map.shard([source.get(name) for name in mapped.hf], part, parts))


@torch.no_grad()
def export_hf_weights(
    chunks: Sequence[torch.nn.Module], hf_config: PretrainedConfig, bucket_bytes: int
) -> Iterator[Bucket]:
    """The model's weights by Hugging Face names, in their dtype, in buckets of about `bucket_bytes`; collective.

    Rank 0 yields tensors of its own memory, on its device; the others yield as many empty buckets. An output layer
    tied to the embedding is not exported. The weights must not change before the iterator is used up.
    """
    rank = torch.distributed.get_rank()
    for bucket in _in_buckets(_parameters(chunks, hf_config), bucket_bytes):
        exported: Bucket = []
        for mapped, parameter in bucket:
            shards = _collect(parameter.detach(), mapped.map.split)
            if rank == 0:
                # Contiguous copies: what leaves must not change with the next update, nor drag its buffer along.
                full = (tensor.clone(memory_format=torch.contiguous_format) for tensor in mapped.map.join(shards))
                exported.extend(zip(mapped.hf, full, strict=True))
        yield exported


def _parameters(
    chunks: Sequence[torch.nn.Module], hf_config: PretrainedConfig
) -> list[tuple[MappedTensor, torch.nn.Parameter]]:
    """Each parameter of the model with its Hugging Face tensors, in the same order on every rank."""
    assert len(chunks) == 1, "a model of several chunks needs the layers' offsets"
    parameters = dict(unwrap(chunks[0]).named_parameters())
    parts = parallel_state.get_tensor_model_parallel_world_size()
    mapped = list(tensors(hf_config, padded_vocab_size(hf_config.vocab_size, parts)))
    difference = parameters.keys() ^ {tensor.megatron for tensor in mapped}
    assert not difference, f"the tables of {hf_config.model_type} and its model disagree about {sorted(difference)}"
    return [(tensor, parameters[tensor.megatron]) for tensor in mapped]


def _check_names(
    pairs: Sequence[tuple[MappedTensor, torch.nn.Parameter]], hf_config: PretrainedConfig, source: WeightSource
) -> None:
    """Refuse weights that the model has no place for: they would be left out without a word."""
    wanted = {name for mapped, _ in pairs for name in mapped.hf}
    unknown = sorted(name for name in source.names() if name not in wanted and not name.endswith(_DERIVED))
    if unknown:
        raise ValueError(
            f"the weights hold {len(unknown)} tensors that a {hf_config.model_type} of this config does not have, "
            f"{unknown[0]!r} among them"
        )


def _hf_shapes(mapped: MappedTensor, parameter: Tensor) -> list[tuple[int, ...]]:
    """Shapes of the full Hugging Face tensors in a parameter: joined without data, from this rank's shape."""
    _, parts = _tensor_parallel_place()
    shards = [torch.empty_like(parameter, device="meta")] * parts
    return [tuple(tensor.shape) for tensor in mapped.map.join(shards)]


def _in_buckets(
    pairs: Sequence[tuple[MappedTensor, torch.nn.Parameter]], bucket_bytes: int
) -> Iterator[list[tuple[MappedTensor, torch.nn.Parameter]]]:
    """Cut where the next parameter would not fit; one alone may be larger than a bucket."""
    bucket: list[tuple[MappedTensor, torch.nn.Parameter]] = []
    filled = 0
    for mapped, parameter in pairs:
        size = sum(torch.Size(shape).numel() for shape in _hf_shapes(mapped, parameter)) * parameter.element_size()
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((mapped, parameter))
        filled += size
    if bucket:
        yield bucket


def _collect(shard: Tensor, split: bool) -> list[Tensor]:
    """All tensor-parallel parts of a parameter on rank 0, in order; nothing of use elsewhere."""
    part, parts = _tensor_parallel_place()
    # Rank 0 has all it needs from its own tensor-parallel group; the other replicas only keep step.
    group_of_rank_0 = parallel_state.get_tensor_model_parallel_src_rank() == 0
    if parts == 1 or not split or not group_of_rank_0:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(parts)] if part == 0 else None
    torch.distributed.gather(shard, shards, dst=0, group=parallel_state.get_tensor_model_parallel_group())
    return shards or []


def _tensor_parallel_place() -> tuple[int, int]:
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
