"""Hugging Face weights into a Megatron model, tensor by tensor, at any layout; `export` is the way out.

`weight_plan` says which rank holds which tensor, and its map does the arithmetic. Here every rank
cuts its own parts out of full tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dagrl.backends.megatron.engine.model import unwrap
from dagrl.backends.megatron.engine.weight_plan import local_tensors, part_of, plan
from dagrl.backends.runtime.initial_weights import WeightSource
from dagrl.model_files.tensor_names import OUTPUT, SCORE, check_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@torch.no_grad()
def load_hf_weights(
    chunks: Sequence[torch.nn.Module], hf_config: PretrainedConfig, source: WeightSource, head: str = "lm"
) -> None:
    """Set every parameter of the rank's chunks from `source`, in the parameters' own dtype.

    A rank reads only its own parameters, and one parameter's full tensors at a time. A value head that `source` lacks
    starts as zeros. Raises ValueError if a tensor is missing, has a shape that contradicts the config, is in 8 bits or
    is not part of the model, and for a missing reward head.
    """
    planned = plan(hf_config, unwrap(chunks[0]).config, head)
    names = set(source.names())
    # A critic may start from a language model, whose output layer it does not use.
    unused = set() if head == "lm" else {OUTPUT}
    check_names(names, {name for tensor in planned for name in tensor.mapped.hf} | unused, hf_config)
    for tensor, parameter in local_tensors(chunks, planned):
        if tensor.mapped.hf == (SCORE,) and SCORE not in names and head == "value":
            parameter.zero_()
            continue
        for name, shape in zip(tensor.mapped.hf, tensor.mapped.shapes, strict=True):
            if (found := _shape(source, name)) != shape:
                raise ValueError(f"tensor {name!r} is {list(found)}, but its config says {list(shape)}")
        full = [source.get(name) for name in tensor.mapped.hf]
        parameter.copy_(tensor.mapped.map.shard(full, part_of(tensor), tensor.parts))


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
