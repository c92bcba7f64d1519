"""Writes a sharded state in Megatron's distributed format in a background thread.

Megatron's own callers of its asynchronous writer do not suit a Ray worker: one forks the process, with CUDA, NCCL and
Ray's threads in it, the other starts a second process that requires a GPU. A thread suffices, because copying to files
and waiting for the disk release the GIL. Its messages to other ranks use a separate gloo group, so that they neither
interfere with collectives of training nor need the GPU.

A folder is complete once it has `FILES`, which rank 0 writes when every rank's files are on disk.
"""

from __future__ import annotations

import datetime
import json
import os
import queue
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dagrl.backends.runtime.pinned_memory import PinnedCopies

FILES = "files.json"
"""Size of each file of a finished checkpoint; written last."""
_FILES = 4
"""Files that a rank writes in parallel: one thread serialises about 1 GB/s."""
_UNWRITTEN_BYTES = 2**28
"""Most bytes of a file that are not yet on disk. By default, Linux may start to write only when a tenth of the
machine's memory is waiting, so that the disk would idle until all tensors are serialised."""

_Tensors = Iterable[tuple[WriteItem, torch.Tensor]]
_File = tuple[str, str, tuple[list[tuple[WriteItem, BytesIO]], _Tensors]]
"""Megatron's description: path, name, and (description, content) of the objects and the tensors in a file."""


class BackgroundWriter:
    """Writes one state at a time in the background. One per rank."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` bounds every wait for other ranks and for the disk."""
        self._timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._pinned = PinnedCopies()
        """Copies of the newest state. Allocating takes longer than copying, so the memory stays for the next one."""
        self._copied = threading.Event()
        self._copied.set()
        self._folder = Path()
        self._failure: Exception | None = None

    def start(self, folder: Path, content: ShardedStateDict, *, copy: bool) -> None:
        """Start to write `content` to the existing `folder`, after an earlier write. Collective.

        With `copy`, the tensors may change after `wait_until_copied`, otherwise after `finish`.
        """
        # Keep the failure of that write for its caller, which may be another one: records are saved here too.
        self.finish(wait=True, forget=False)
        if self._group is None:
            timeout = datetime.timedelta(seconds=self._timeout_s)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        # Megatron's default is a queue of another process, which takes seconds to start and runs ``__main__`` again, in
        # a worker Ray's.
        filesystem_async._results_queue = queue.Queue()
        values = (getattr(value, "data", None) for value in nested_values(content))
        live = {value.untyped_storage().data_ptr() for value in values if isinstance(value, torch.Tensor)}
        strategy = _Strategy()
        request = dist_checkpointing.save(
            content, str(folder), sharded_strategy=strategy, async_sharded_save=True, async_strategy="mcore"
        )
        assert isinstance(request, AsyncRequest) and strategy.writer is not None
        self._folder, self._failure = folder, None
        if copy:
            if torch.cuda.is_available():
                # The copies would not wait for the kernels of the last update.
                torch.cuda.synchronize()
            self._copied.clear()
        work = (strategy.writer.write_buckets, live if copy else None, strategy.writer, strategy.metadata)
        # A daemon, so that a failing run need not wait for it.
        self._thread = threading.Thread(target=self._run, args=work, name="checkpoint", daemon=True)
        self._thread.start()

    def wait_until_copied(self) -> None:
        """Wait until the tensors of a state that is copied may change. Raises TimeoutError after the timeout."""
        if not self._copied.wait(self._timeout_s):
            raise TimeoutError(f"the state for {self._folder} was not copied to the host within {self._timeout_s:g} s")

    def finish(self, *, wait: bool, forget: bool = True) -> bool:
        """Whether no write is running; with `wait`, blocks until then. Not collective.

        Raises the error of the last write, with `forget` once: OSError for an error of the disk, MemoryError if a rank
        could not copy its state to the host. Raises TimeoutError after the timeout.
        """
        if self._thread is None:
            return True
        self._thread.join(self._timeout_s if wait else 0)
        if self._thread.is_alive():
            if wait:
                raise TimeoutError(f"the checkpoint {self._folder} was not written within {self._timeout_s:g} s")
            return False
        if forget or self._failure is None:
            self._thread = None
        if isinstance(self._failure, OSError):
            # Megatron's message is a traceback without the system's error, which is nearly always a full disk.
            free = shutil.disk_usage(self._folder).free / 2**20
            raise OSError(
                f"cannot write the checkpoint to {self._folder}, where {free:.0f} MiB are free; make room, or lower "
                "run.keep"
            ) from self._failure
        if self._failure is not None:
            raise self._failure
        return True

    def _run(
        self, files: Sequence[_File], live: set[int] | None, writer: FileSystemWriterAsync, metadata: Metadata
    ) -> None:
        try:
            failure: Exception | None = None
            try:
                if live is not None:
                    files = _copied(files, live, self._pinned)
            except OSError as error:
                # Not an error of the disk. The other ranks wait for this one, so it continues.
                failure = MemoryError(str(error))
            finally:
                self._copied.set()
            self._write(files, failure, writer, metadata)
        except Exception as error:  # noqa: BLE001
            # Megatron's writer and torch.distributed may raise anything. An exception that ended the thread would be
            # lost, and the state would count as written; `finish` raises it instead.
            self._failure = error

    def _write(
        self, files: Sequence[_File], failure: Exception | None, writer: FileSystemWriterAsync, metadata: Metadata
    ) -> None:
        """Write this rank's files; rank 0 collects the results and writes the metadata. All raise a `failure` of any
        rank.
        """
        results = failure or _write_files(files, getattr(writer, "transforms", None))
        is_first, ranks = dist.get_rank() == 0, dist.get_world_size()
        all_results: list[list[WriteResult] | Exception | None] | None = [None] * ranks if is_first else None
        dist.gather_object(results, all_results, dst=0, group=self._group)
        verdict: list[Exception | None] = [None]
        if all_results is not None:
            # A rank that failed sends its exception instead of a list.
            failed = [rank for rank, result in enumerate(all_results) if not isinstance(result, list)]
            if failed:
                first = all_results[failed[0]]
                kind = MemoryError if isinstance(first, MemoryError) else OSError
                verdict = [kind(f"ranks {failed} could not save their state: {first}")]
            else:
                try:
                    writer.finish(metadata, all_results)
                    save_config(CheckpointingConfig(_Strategy.BACKEND), str(self._folder))
                    _write_file_sizes(self._folder)
                except OSError as error:
                    verdict = [OSError(f"rank 0 could not write: {error}")]
        dist.broadcast_object_list(verdict, src=0, group=self._group)
        if verdict[0] is not None:
            raise verdict[0]


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's strategy, with access to its writer; its own last part would use the group of training."""

    BACKEND = "torch_dist"

    def __init__(self) -> None:
        super().__init__(self.BACKEND, thread_count=_FILES)
        self.writer: FileSystemWriterAsync | None = None
        self.metadata: Metadata | None = None

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, save_state_dict_ret: tuple[object, Metadata], async_strategy: str
    ) -> AsyncRequest:
        self.writer, self.metadata = writer, save_state_dict_ret[1]
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, async_strategy)


def _copied(files: Sequence[_File], live: set[int], pinned: PinnedCopies) -> list[_File]:
    """The files with copies of all tensors in host memory, `pinned` for tensors on a GPU.

    Megatron's own copies would be pinned by the driver, at a tenth of the speed. It has copied views on the host
    already, but not whole tensors: the `live` ones, by address of their storage.
    """
    on_gpu = [tensor for *_, (_, tensors) in files for _, tensor in tensors if tensor.is_cuda]
    copies = iter(pinned.take(on_gpu) if on_gpu else ())

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda:
            return next(copies)
        return tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor

    return [
        (path, name, (objects, [(item, copy(tensor)) for item, tensor in tensors]))
        for path, name, (objects, tensors) in files
    ]


def _write_files(files: Sequence[_File], transforms: object) -> list[WriteResult] | Exception:
    """Write files in parallel, with fsync. Returns torch's descriptions of their contents, or the first failure."""
    results: list[list[WriteResult] | Exception] = [OSError("the file was not written") for _ in files]

    def write(number: int) -> None:
        path, name, (objects, tensors) = files[number]
        bucket = (path, name, (objects, _on_host(Path(path), tensors)))
        _, results[number] = FileSystemWriterAsync.write_preloaded_data(
            [transforms] if transforms is not None else [], number, bucket, None, None, use_fsync=True
        )

    threads = [threading.Thread(target=write, args=(number,), daemon=True) for number in range(len(files))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written: list[WriteResult] = []
    for result in results:
        if isinstance(result, Exception):
            return result
        written += result
    return written


def _on_host(path: Path, tensors: _Tensors) -> Iterator[tuple[WriteItem, torch.Tensor]]:
    """Copy tensors to the host at the writer's request, at a pace that the disk can follow."""
    unwritten = 0
    for item, tensor in tensors:
        yield item, tensor.cpu()
        unwritten += tensor.nbytes
        if unwritten >= _UNWRITTEN_BYTES:
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
            unwritten = 0


def _write_file_sizes(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILES)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    aside = folder / f".{FILES}"
    aside.write_text(json.dumps(sizes, indent=1))
    aside.rename(folder / FILES)
