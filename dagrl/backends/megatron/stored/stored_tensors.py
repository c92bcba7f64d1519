"""Reads a folder in Megatron's distributed format (`torch_dist`) without Megatron, layout or process group.

The format is torch's: ``.metadata`` lists the tensors and where their pieces are, ``*.distcp`` files hold the pieces,
``metadata.json`` names the format. Nothing that could run code is unpickled: ``.metadata`` may contain only classes
that describe tensors, and the contents are read by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as load_pieces
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dagrl.backends.megatron.stored_folder import METADATA, check_folder

EMBEDDING = "embedding.word_embeddings.weight"
COMMON = "common_state/shard_0_1"
"""Key of Megatron's state other than tensors, a list of one object."""

AVERAGE = "average."
"""Key prefix of the weights' moving average."""
_NOT_WEIGHTS = ("optimizer.", AVERAGE, "rng", "common_state", "rerun_state_machine_state", "mtp.")
"""Key prefixes of a checkpoint's contents other than the model, and of multi-token prediction layers."""
_LAYER = re.compile(r"decoder\.layers\.\d+\.")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's description."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ForbiddenPickleError(ValueError):
    """A file could run code when it is unpickled."""


def would_run_code(file: Path, asked: str) -> ForbiddenPickleError:
    """The error for a file or folder with a pickle of anything but data."""
    return ForbiddenPickleError(f"{file} would run code when read ({asked}); do not use this folder")


class StoredTensors:
    """The tensors of one folder; pieces are read one at a time."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata. ValueError for a folder that is missing, torn or in another format, or could run code."""
        self.folder = folder
        self.metadata, self.tensors = _read_metadata(folder)
        """All tensors by key, including an optimizer's."""
        self._reader = CheckedReader(folder, self.metadata)

    def weights(self) -> dict[str, StoredTensor]:
        return {name: tensor for name, tensor in self.tensors.items() if not name.startswith(_NOT_WEIGHTS)}

    @property
    def layer_by_layer(self) -> bool:
        """Whether keys belong to single layers. If all layers are alike, a key holds all of them, stacked."""
        return any(map(_LAYER.match, self.tensors))

    def vocabulary_rows(self, vocab_size: int) -> int:
        """Rows of the model's embedding with padding. Raises ValueError for a folder without a model."""
        embedding = self.tensors.get(EMBEDDING)
        if embedding is None:
            raise ValueError(f"{self.folder} has no model: it has no tensor {EMBEDDING!r}")
        if embedding.shape[0] < vocab_size:
            raise ValueError(
                f"{self.folder} is another model's: its vocabulary has {embedding.shape[0]} rows, and this one "
                f"{vocab_size} tokens"
            )
        return embedding.shape[0]

    def read(self, key: str, index: tuple[int, ...] = ()) -> torch.Tensor:
        """The tensor `key`, or its part at `index` along the first axes, in its own dtype, on the CPU."""
        stored = self.tensors.get(key)
        if stored is None:
            raise ValueError(f"{self.folder} has no tensor {key!r}; is it a checkpoint of this model?")
        wanted = _Part(stored, index)
        try:
            load_pieces({key: wanted.tensor}, storage_reader=self._reader, planner=_Planner(key, wanted), no_dist=True)
        except (CheckpointException, OSError) as error:
            raise ValueError(f"cannot read tensor {key!r} in {self.folder}; copy the folder again") from error
        return wanted.tensor.reshape(stored.shape[len(index) :])

    def read_object(self, key: str) -> Any:
        """The object pickled under `key`: containers of numbers, texts and tensors. ValueError if it could run code."""
        place = self.metadata.storage_data.get(MetadataIndex(key)) if self.metadata.storage_data else None
        if place is None:
            raise ValueError(f"{self.folder} holds no {key!r}; is it a checkpoint of dagrl?")
        file = self.folder / place.relative_path
        try:
            with file.open("rb") as stream:
                stream.seek(place.offset)
                return torch.load(io.BytesIO(stream.read(place.length)), weights_only=True)
        except pickle.UnpicklingError as error:
            # The rest of torch's message says how to run the code.
            asked = re.search(r"Unsupported .*?(?= was not|\.|$)", str(error))
            raise would_run_code(file, asked[0] if asked else "unknown objects") from error
        except (OSError, *_TORN) as error:
            raise ValueError(f"cannot read {file}: {_reason(error)}; copy the folder again") from error


class _Part:
    def __init__(self, stored: StoredTensor, index: tuple[int, ...]) -> None:
        sizes = (*(1 for _ in index), *stored.shape[len(index) :])
        offsets = (*index, *(0 for _ in stored.shape[len(index) :]))
        self.chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        self.tensor = torch.empty(sizes, dtype=stored.dtype)


class _Planner(DefaultLoadPlanner):
    """Torch's planner for a part of a tensor; the default reads whole ones."""

    def __init__(self, key: str, part: _Part) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._key, self._part = key, part

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        described = cast(TensorStorageMetadata, self.metadata.state_dict_metadata[self._key])
        return LoadPlan(create_read_items_for_chunk_list(self._key, described, [self._part.chunk]))

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._part.tensor


class CheckedReader(FileSystemReader):
    """Torch's reader, with safely read metadata. It still unpickles objects other than tensors."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self.metadata


def _read_metadata(folder: Path) -> tuple[Metadata, dict[str, StoredTensor]]:
    check_folder(folder)
    try:
        metadata = _DescriptionUnpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        return metadata, _tensors_of(metadata)
    except _ForbiddenError as error:
        raise would_run_code(folder / METADATA, str(error)) from error
    except _TORN as error:
        raise ValueError(f"cannot read {folder / METADATA}: {_reason(error)}; copy the folder again") from error


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


_TORN = (
    *(pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError),
    *(OverflowError, MemoryError, RuntimeError, SystemError),  # RecursionError is a RuntimeError
)
"""Errors of unpickling wrong bytes."""


def _tensors_of(metadata: Metadata) -> dict[str, StoredTensor]:
    tensors = {}
    for name, description in metadata.state_dict_metadata.items():
        if isinstance(description, TensorStorageMetadata):
            dtype, shape = description.properties.dtype, tuple(description.size)
            if not isinstance(dtype, torch.dtype) or not all(isinstance(size, int) and size >= 0 for size in shape):
                raise TypeError(f"it gives tensor {name!r} no dtype and shape")
            tensors[name] = StoredTensor(shape, dtype)
    return tensors


class _ForbiddenError(Exception):
    """A pickle contains something that does not describe tensors."""


_CHECKPOINT = "torch.distributed.checkpoint"
_OLD_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_DESCRIPTIONS = frozenset(
    (module, name)
    for module, names in {
        f"{_CHECKPOINT}.metadata": (
            *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata", "TensorProperties"),
            *("TensorStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING"),
        ),
        f"{_CHECKPOINT}.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
        f"{_CHECKPOINT}.filesystem": ("_StorageInfo", "_StoragePrefix"),
        # Empty classes that Megatron up to 0.15 adds to the metadata.
        _OLD_MEGATRON: ("MCoreMetadata", "MCoreSavePlan"),
        "torch": ("Size", "device"),
        "torch.serialization": ("_get_layout",),
        "collections": ("OrderedDict", "defaultdict"),
        "builtins": ("set", "slice", "dict"),
        "pathlib": ("PosixPath", "PurePosixPath"),
    }.items()
    for name in names
)


class _DescriptionUnpickler(pickle.Unpickler):
    """Unpickles descriptions of tensors and rejects anything else."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _DESCRIPTIONS:
            return super().find_class(module, name)
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if not isinstance(dtype, torch.dtype):
            raise _ForbiddenError(f"it asks for {module}.{name}")
        return dtype
