"""Hugging Face weights into a Megatron model, and out of it again, tensor by tensor, at any layout.

`families` names the tensors, `tensor_maps` does the arithmetic and `weight_plan` says who holds what. Here every rank
cuts its own parts out of full tensors when loading; `gather` brings the parts to rank 0 when exporting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state

from dagrl.engines.base import Bucket
from dagrl.engines.megatron.gather import Gatherer
from dagrl.engines.megatron.model import unwrap
from dagrl.engines.megatron.weight_plan import PlannedTensor, held_tensors, local_tensors, plan
from dagrl.engines.model_source import SCORE, WeightSource
from dagrl.engines.weight_names import check_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LM_HEAD = "lm_head.weight"


@torch.no_grad()
def load_hf_weights(
    chunks: Sequence[torch.nn.Module], hf_config: PretrainedConfig, source: WeightSource, head: str = "lm"
) -> None:
    """Set every parameter of the rank's chunks from `source`, in the parameters' own dtype.

    A rank reads only what it holds, and one parameter's full tensors at a time. A value head that `source` does not
    have starts as zeros. Raises ValueError where a tensor is missing, has another shape than the config says, is in 8
    bits or is not part of the model, and for a reward head that `source` does not have.
    """
    planned = plan(hf_config, unwrap(chunks[0]).config, head)
    names = set(source.names())
    # A critic may start from a language model, whose output layer it has no place for.
    unused = set() if head == "lm" else {_LM_HEAD}
    check_names(names, {name for tensor in planned for name in tensor.mapped.hf} | unused, hf_config)
    for tensor, parameter in local_tensors(chunks, planned):
        if tensor.mapped.hf == (SCORE,) and SCORE not in names and head == "value":
            parameter.zero_()
            continue
        for name, shape in zip(tensor.mapped.hf, tensor.hf_shapes, strict=True):
            if (found := _shape(source, name)) != shape:
                raise ValueError(f"tensor {name!r} is {list(found)}, but its config says {list(shape)}")
        full = [source.get(name) for name in tensor.mapped.hf]
        parameter.copy_(tensor.mapped.map.shard(full, _part(tensor), tensor.parts))


@torch.no_grad()
def export_hf_weights(
    chunks: Sequence[torch.nn.Module], hf_config: PretrainedConfig, bucket_bytes: int, head: str = "lm"
) -> Iterator[Bucket]:
    """The model's weights by the names of published checkpoints, in buckets of about `bucket_bytes`; collective.

    They keep their dtype. Rank 0 yields tensors of its own memory, on its device; the others yield as many empty
    buckets. The buckets are the same at any layout. An output layer tied to the embedding is not exported. The weights
    must not change before the iterator is used up.
    """
    planned = plan(hf_config, unwrap(chunks[0]).config, head)
    gatherer = Gatherer(held_tensors(chunks, planned))
    for bucket in _in_buckets(planned, gatherer, bucket_bytes):
        exported: Bucket = []
        for tensor, parts in zip(bucket, gatherer.gather(bucket), strict=False):
            # Contiguous copies: what leaves must not change with the next update, nor drag its buffer along.
            joined = tensor.mapped.map.join(parts)
            full = (whole.clone(memory_format=torch.contiguous_format) for whole in joined)
            exported.extend(zip(tensor.mapped.hf, full, strict=True))
        yield exported


def _shape(source: WeightSource, name: str) -> tuple[int, ...]:
    try:
        return source.shape(name)
    except ValueError as error:
        if name != SCORE:
            raise
        raise ValueError(
            f"head: reward needs the weights of a reward model, and these have no {SCORE}; "
            "name a folder of a sequence classifier with one label"
        ) from error


def _part(tensor: PlannedTensor) -> int:
    """Which of the tensor's parts this rank holds."""
    if tensor.parts == 1:
        return 0
    if tensor.expert_rank is None:
        return parallel_state.get_tensor_model_parallel_rank()
    return parallel_state.get_expert_tensor_parallel_rank()


def _in_buckets(
    planned: Sequence[PlannedTensor], gatherer: Gatherer, bucket_bytes: int
) -> Iterator[list[PlannedTensor]]:
    """Cut where the next tensor would not fit; one alone may be larger than a bucket."""
    bucket: list[PlannedTensor] = []
    filled = 0
    for tensor in planned:
        size = tensor.numel * gatherer.dtype(tensor).itemsize
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += size
    if bucket:
        yield bucket
