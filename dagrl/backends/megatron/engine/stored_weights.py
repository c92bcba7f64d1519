"""Loads initial weights from a folder in Megatron's distributed format, written and read by any layout.

The folder may be an engine's part of a dagrl checkpoint (``checkpoints/step_10/actor``), or one of Megatron-LM,
megatron-bridge or ``dagrl convert``. It is not trusted: `stored_tensors` reads its metadata, and only tensors are
loaded, never the pickled objects that Megatron stores beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.transformer import MegatronModule
from torch.distributed.checkpoint import CheckpointException

from dagrl.backends.megatron.engine.model import unwrap
from dagrl.backends.megatron.stored.stored_tensors import StoredTensors
from dagrl.backends.megatron.stored_folder import newest_checkpoint
from dagrl.config.errors import counted
from dagrl.model_files.stored_weights import check_finite

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_HEAD = "output_layer."


@torch.no_grad()
def load_start_weights(
    chunks: Sequence[torch.nn.Module], hf_config: PretrainedConfig, folder: Path, head: str = "lm"
) -> None:
    """Set every parameter of the model from `folder`, in the parameters' dtype. Collective.

    A value head starts as zeros if the folder has none. Raises ValueError for a folder that is not a checkpoint of this
    model, for a missing reward head, and for NaN or infinite weights.
    """
    folder = newest_checkpoint(folder)
    stored = StoredTensors(folder)
    stored.vocabulary_rows(hf_config.get_text_config().vocab_size)
    own_head = head != "lm" and _has_head(stored, hf_config)
    if head == "reward" and not own_head:
        raise ValueError(f"head: reward needs the weights of a reward model, and {folder} has none")
    wanted: ShardedStateDict = {}
    passed_over: set[str] = set()
    for i, chunk in enumerate(chunks):
        model = cast(MegatronModule, unwrap(chunk))
        everything = model.sharded_state_dict(metadata={"non_homogeneous_layers": stored.layer_by_layer})
        wanted[f"model_{i}"], _ = extract_sharded_tensors_and_factories(everything)
        if head != "lm" and not own_head:
            for name in [name for name in wanted[f"model_{i}"] if name.startswith(_HEAD)]:
                tensor = wanted[f"model_{i}"].pop(name)
                tensor.data.zero_()
                passed_over.add(tensor.key)
    on_disk, _, factories = load_preprocess(wanted)
    check_fit(stored, on_disk)
    _check_nothing_is_left_over(stored, on_disk, passed_over)
    try:
        loaded = TorchDistLoadShardedStrategy().load(on_disk, folder)
    except (CheckpointingException, CheckpointException, OSError) as error:
        raise ValueError(f"cannot read the weights in {folder}; copy the folder again") from error
    loaded = apply_factory_merges(loaded, factories)
    for i, chunk in enumerate(chunks):
        missing, unexpected = unwrap(chunk).load_state_dict(loaded[f"model_{i}"], strict=False)
        missing = [name for name in missing if not name.endswith("_extra_state") and not name.startswith(_HEAD)]
        assert not missing and not unexpected, f"no values for {missing}, no place for {unexpected}"
    check_all_finite(chunks, folder)


def check_fit(stored: StoredTensors, on_disk: ShardedStateDict) -> None:
    """Raise ValueError for the first tensor of a sharded state that the folder lacks or stores in another shape.

    `on_disk` is the state after ``load_preprocess``, which expands parameters stored as several tensors.
    """
    for tensor in nested_values(on_disk):
        if not isinstance(tensor, ShardedTensor):
            continue
        on_file = stored.tensors.get(tensor.key)
        if on_file is None:
            raise ValueError(
                f"checkpoint {stored.folder} does not fit this engine: it has no tensor {tensor.key!r}; "
                "is it another model's?"
            )
        shape = tuple(tensor.global_shape)
        if on_file.shape != shape and not tensor.allow_shape_mismatch:
            raise ValueError(
                f"checkpoint {stored.folder} does not fit this engine: tensor {tensor.key!r} is {list(on_file.shape)} "
                f"there and {list(shape)} here; is it another model's?"
            )


def check_all_finite(chunks: Sequence[torch.nn.Module], folder: Path) -> None:
    """Raise ValueError on all ranks if any rank has loaded NaN or infinite values."""
    fault: str | None = None
    try:
        for chunk in chunks:
            for name, parameter in unwrap(chunk).named_parameters():
                check_finite(parameter, f"{folder}: tensor {name!r} {list(parameter.shape)}")
    except ValueError as error:
        fault = str(error)
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    if found := next(filter(None, faults), None):
        raise ValueError(found)


def _has_head(stored: StoredTensors, hf_config: PretrainedConfig) -> bool:
    head = stored.tensors.get(f"{_HEAD}weight")
    return head is not None and head.shape == (1, hf_config.get_text_config().hidden_size)


def _check_nothing_is_left_over(stored: StoredTensors, on_disk: ShardedStateDict, passed_over: set[str]) -> None:
    """Reject weights that no rank has a parameter for, which would be dropped silently."""
    mine = {tensor.key for tensor in nested_values(on_disk) if isinstance(tensor, ShardedTensor)} | passed_over
    keys: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(keys, mine)
    left_over = sorted(stored.weights().keys() - set().union(*keys))
    if left_over:
        raise ValueError(
            f"checkpoint {stored.folder} does not fit this engine: it holds {counted(len(left_over), 'tensor')} that "
            f"the model does not have, {left_over[0]!r} among them"
        )
