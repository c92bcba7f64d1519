"""Writes a folder in Megatron's distributed format from tensors made one at a time, in one process.

The counterpart of `stored_tensors`. Megatron's own writer needs all tensors at once and a process group.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as save_pieces
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dagrl.backends.megatron.stored.stored_tensors import COMMON
from dagrl.backends.megatron.stored_folder import BACKEND, CONFIG


@dataclass(slots=True)
class TensorToWrite:
    """A tensor, made at once or by index along the first axes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Mapping[tuple[int, ...], Callable[[], torch.Tensor]]
    """Index -> makes the part. All indices have the same number of axes; () is the whole tensor."""

    def __create_write_items__(self, fqn: str, object: TensorToWrite) -> list[WriteItem]:
        """Torch's `_Checkpointable` protocol: describe the tensors to write, without making them."""
        items = []
        for number, index in enumerate(self.parts):
            rest = self.shape[len(index) :]
            chunk = ChunkStorageMetadata(
                offsets=torch.Size((*index, *(0 for _ in rest))), sizes=torch.Size((*(1 for _ in index), *rest))
            )
            data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), torch.Size(self.shape))
            place = MetadataIndex(fqn, chunk.offsets, number)
            items.append(WriteItem(place, WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        axes = len(next(iter(self.parts)))
        part = tuple(index.offset)[:axes]
        rest = self.shape[axes:]
        made = self.parts[part]()
        assert tuple(made.shape) == rest, f"{index.fqn} at {part} is {list(made.shape)}, not {list(rest)}"
        if made.dtype != self.dtype:
            raise ValueError(f"{index.fqn} is {self.dtype} in one layer and {made.dtype} in another; use one dtype")
        return made.reshape(*(1 for _ in part), *rest).contiguous()


class _Planner(DefaultSavePlanner):
    """Torch's planner, but makes a part only when it is written."""

    def lookup_object(self, index: MetadataIndex) -> object:
        content: object = self.state_dict[index.fqn]
        return content.__get_tensor_shard__(index) if isinstance(content, TensorToWrite) else content


def write_tensors(folder: Path, tensors: Mapping[str, TensorToWrite], common: Mapping[str, object]) -> None:
    """Write `tensors` by key, and Megatron's `common` state, to the existing `folder`.

    One part is in memory at a time. Raises OSError if it cannot be written, and errors of making a part.
    """
    for key, tensor in tensors.items():
        axes = len(next(iter(tensor.parts)))
        expected = math.prod(tensor.shape[:axes])
        assert len(tensor.parts) == expected, f"{key} has {len(tensor.parts)} parts of {expected}"
    content: STATE_DICT_TYPE = {**tensors, COMMON: [dict(common)]}
    try:
        save_pieces(
            content,
            storage_writer=FileSystemWriter(folder, single_file_per_rank=True, thread_count=1),
            planner=_Planner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )
    except CheckpointException as error:
        # The error of the only rank, unwrapped.
        raise next(iter(error.failures.values()))[0] from error
    (folder / CONFIG).write_text(json.dumps({"sharded_backend": BACKEND, "sharded_backend_version": 1}))
