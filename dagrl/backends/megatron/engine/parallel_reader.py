"""Reads the tensors of a checkpoint in parallel, directly into their memory, and compares checksums.

torch's own reader reads one tensor after the other through Python's file objects, and copies it three times.
"""

from __future__ import annotations

import ctypes
import io
import os
import zipfile
import zlib
from collections.abc import Buffer, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from megatron.core.dist_checkpointing.strategies import torch as strategies
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dagrl.backends.megatron.stored.stored_tensors import CheckedReader, StoredTensors

_THREADS = 8
"""A thread reads and compares about 1 GB/s."""
_BLOCK = 2**26
"""Most bytes that one call reads."""


@contextmanager
def parallel_reads(stored: StoredTensors) -> Iterator[None]:
    """Context in which Megatron reads this folder, with `ParallelReader`."""
    own = strategies._get_filesystem_reader
    strategies._get_filesystem_reader = lambda *_, **__: ParallelReader(stored)
    try:
        yield
    finally:
        strategies._get_filesystem_reader = own


@dataclass(frozen=True, slots=True)
class _Record:
    """The bytes of a tensor in a file."""

    start: int
    checksum: int
    like: torch.Tensor
    """Its shape, strides and type, on the meta device."""


class ParallelReader(CheckedReader):
    """torch's reader of checkpoint folders, with several tensors at a time, and without pickles that could run code."""

    def __init__(self, stored: StoredTensors) -> None:
        super().__init__(stored.folder, stored.metadata)
        self._stored = stored

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """See `StorageReader.read_data`. Raises CheckpointException for tensors that differ from their checksums."""
        # The planner itself would unpickle arbitrary objects.
        objects = cast("DefaultLoadPlanner", planner).state_dict
        items: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        others = []
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint") as pool:
            reads = []
            for file, wanted in items.items():
                for item in sorted(wanted, key=lambda item: self.storage_data[item.storage_index].offset):
                    if item.type == LoadItemType.BYTE_IO:
                        objects[item.dest_index.fqn] = self._stored.read_object(item.storage_index.fqn)
                    elif self.storage_data[item.storage_index].transform_descriptors:
                        others.append(item)
                    else:
                        reads.append(pool.submit(self._read, Path(self.path) / file, item, planner))
            for read in reads:
                read.result()
        return super().read_data(LoadPlan(others), planner)

    def _read(self, file: Path, item: ReadItem, planner: LoadPlanner) -> None:
        with file.open("rb", buffering=0) as stream:
            record = self._record(stream, item)
            target = planner.resolve_tensor(item).detach()
            like = record.like
            # Directly into its memory, if the layouts are equal.
            fits = target.device.type == "cpu" and target.is_contiguous() and target.dtype == like.dtype
            if fits and like.is_contiguous() and target.shape == like.shape:
                whole, raw = target, target.reshape(-1).view(torch.uint8)
            else:
                raw = torch.empty(like.nbytes, dtype=torch.uint8)
                whole = raw.view(like.dtype).as_strided(like.shape, like.stride())
            if _fill(raw, stream.fileno(), record.start) != record.checksum:
                name = item.storage_index.fqn
                raise CheckpointException(f"{file}: {name} differs from its checksum", {})
        if whole is not target:
            part = whole
            for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(axis, start, length)
            target.copy_(part)
        planner.commit_tensor(item, target)

    def _record(self, stream: io.FileIO, item: ReadItem) -> _Record:
        """Find a tensor's bytes in the archive of ``torch.save`` at its offset in the file."""
        place = self.storage_data[item.storage_index]
        view = _Slice(stream.fileno(), place.offset, place.length)
        like = cast("torch.Tensor", torch.load(cast("IO[bytes]", view), map_location="meta", weights_only=True))
        storage = like.untyped_storage()
        assert storage.nbytes() == like.nbytes, f"{item.storage_index.fqn} is only a part of the saved tensor"
        with zipfile.ZipFile(view) as archive:
            (entry,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
        return _Record(place.offset + storage._checkpoint_offset, entry.CRC, like)


class _Slice(io.RawIOBase):
    """A part of a file as a file object; torch's class cannot seek from its end."""

    def __init__(self, file: int, start: int, length: int) -> None:
        self._file, self._start, self._length, self._place = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        self._place = base + offset
        return self._place

    def readinto(self, buffer: Buffer, /) -> int:
        wanted = memoryview(buffer)[: max(0, self._length - self._place)]
        read = os.preadv(self._file, [wanted], self._start + self._place)
        self._place += read
        return read


def _fill(raw: torch.Tensor, file: int, start: int) -> int:
    """Read bytes into a tensor, uint8 [bytes]; returns their CRC-32."""
    # With numpy() the storage could not be resized afterwards, as offloading does.
    memory = memoryview((ctypes.c_ubyte * len(raw)).from_address(raw.data_ptr())) if len(raw) else memoryview(b"")
    checksum = done = 0
    while done < len(memory):
        block = memory[done : done + _BLOCK]
        read = os.preadv(file, [block], start + done)
        if read == 0:
            raise OSError("the file ends in the middle of a tensor")
        checksum = zlib.crc32(block[:read], checksum)
        done += read
    return checksum
