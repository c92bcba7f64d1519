"""Opens the folder of a run: locks it, writes the pipeline, finds the checkpoint to resume from."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pydantic import TypeAdapter

from dagrl.config.loading.loader import MODULES, LoadedPipeline
from dagrl.config.loading.yaml_source import dump_document
from dagrl.config.schema import OpContract, Pipeline
from dagrl.graph.dag import Graph
from dagrl.graph.inference import build_graph
from dagrl.log_ends import shortened
from dagrl.orchestrator.folder.checkpoint import Checkpoints, RunState
from dagrl.orchestrator.folder.examine import LOCK, PIPELINE, examine
from dagrl.orchestrator.folder.identity import changes
from dagrl.redact import hide_secrets, hiding
from dagrl.tracking.base import replace_text
from dagrl.workers.errors import RefusedFolderError, RunError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run folder that this process has locked."""

    path: Path
    checkpoints: Checkpoints
    resumed: RunState | None
    resumed_from: Path | None
    torn: tuple[str, ...] = ()
    """Faults of newer torn checkpoints, and their new names."""
    changed: str = ""
    """Differences from the pipeline of the resumed run."""

    hide: Callable[[str], str] = hide_secrets
    """Removes the secrets of the pipeline from a text."""

    @property
    def start(self) -> RunState:
        """The run's initial state; step 0 without a checkpoint."""
        return self.resumed or RunState(step=0, model="")

    def keep_details(self, error: RunError) -> None:
        """Write the traceback of a worker to a log file, without the pipeline's secrets."""
        error.cause, error.hint, error.details = map(self.hide, (error.cause, error.hint, error.details))
        if error.details:
            log = self.path / "logs" / "failure.txt"
            with suppress(OSError):  # the disk may be full
                log.parent.mkdir(exist_ok=True)
                replace_text(log, shortened(error.details), private=True)
                error.log = str(log)


@contextmanager
def open_run_folder(
    path: Path,
    pipeline: Pipeline,
    resolved: Mapping[str, object],
    *,
    modules: Path | None = None,
    graph: Graph | None = None,
    again: bool = False,
    rows: int = 0,
) -> Iterator[RunFolder]:
    """Lock `path` for this run and write the resolved pipeline there. A new folder is for its owner alone.

    `modules`: the folder of the user's modules, for `modules_of`. `graph`: the pipeline's graph, for `graph_of_run`.
    `again`: this run resumes after a failure, regardless of ``resume``. `rows`: prompts of the training file.

    Raises RefusedFolderError if another process has locked the folder, `examine` refuses it, or it is not writable.
    Then nothing in the folder changes, nor if the run has finished before. A run that only validates leaves the
    pipeline and the checkpoints of an earlier one as they are.
    """
    with ExitStack() as stack:
        lock = _lock_of(path)
        if lock is not None:
            stack.enter_context(lock)
            _take(lock, path)
        checkpoint, earlier = examine(path, pipeline, resolved, again=again)
        alone = pipeline.run.only_validates
        changed = changes(earlier, resolved) if earlier and checkpoint.state and not alone else ""
        if checkpoint.state and checkpoint.state.finishes(pipeline.run, rows) and not alone:
            yield RunFolder(path, _checkpoints(path, pipeline), checkpoint.state, checkpoint.folder, changed=changed)
            return
        if lock is None:
            with _writing(path):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = stack.enter_context((path / LOCK).open("a+"))
            _take(lock, path)
            # Another process may have started a run in this folder in the meantime.
            checkpoint, earlier = examine(path, pipeline, resolved, again=again)
        if alone and earlier:
            # The folder's own run continues with these files.
            yield RunFolder(
                path, _checkpoints(path, pipeline), checkpoint.state, checkpoint.folder, tuple(checkpoint.torn.values())
            )
            return
        with _writing(path):
            _sign(lock)
            replace_text(path / PIPELINE, dump_document(dict(resolved)), private=True)
            if modules is not None:
                replace_text(path / MODULES, f"{modules.resolve()}\n")
            if graph is not None:
                replace_text(path / CONTRACTS, contracts_text(graph))
            checkpoints = _checkpoints(path, pipeline)
            checkpoints.remove_torn()
            torn = tuple(
                f"{what}; it is now {checkpoints.set_aside(folder).name}" for folder, what in checkpoint.torn.items()
            )
        try:
            yield RunFolder(path, checkpoints, checkpoint.state, checkpoint.folder, torn, changed, hiding(resolved))
        finally:
            # A failed save may have left files; its writers have ended.
            checkpoints.remove_torn()


def _checkpoints(path: Path, pipeline: Pipeline) -> Checkpoints:
    return Checkpoints(path, pipeline.run.keep, pipeline.run.keep_best)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"cannot write to the run folder {path}: {error.strerror}"
        raise RefusedFolderError(
            message, hint="make room or check its permissions, or give another --run-dir"
        ) from error


def _lock_of(path: Path) -> TextIO | None:
    """The folder's lock file, unchanged. None if there is none, or `examine` refuses the folder."""
    lock = path / LOCK
    try:
        return lock.open("r+") if lock.is_file() else None
    except OSError:
        return None


def _take(lock: TextIO, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        raise RefusedFolderError(
            f"another run (pid {holder}) is writing to {path}", hint="wait for it, or give this one its own --run-dir"
        ) from error
    except OSError as error:  # such as a file system without locks
        message = f"{path / LOCK} cannot be locked: {error.strerror}"
        raise RefusedFolderError(message, hint="give the run a --run-dir on another file system") from error


def _sign(lock: TextIO) -> None:
    """Write this process's id into the lock file, unbuffered: on a full disk the file stays unchanged."""
    text = f"{os.getpid()}\n".encode()
    os.ftruncate(lock.fileno(), os.pwrite(lock.fileno(), text, 0))


CONTRACTS = ".contracts.json"
"""The file with the contracts of nodes with user functions."""
_FORM = TypeAdapter(dict[str, OpContract])


def contracts_text(graph: Graph) -> str:
    own = {name: node.contract for name, node in graph.nodes.items() if node.spec and node.spec.user_function}
    return _FORM.dump_json(own).decode()


def graph_of_run(folder: Path, loaded: LoadedPipeline) -> Graph:
    """The graph of the run in `folder`. PipelineError if it is wrong, or a contract is not recorded."""
    try:
        recorded = _FORM.validate_json((folder / CONTRACTS).read_bytes())
    except (OSError, ValueError):  # written by an earlier version, or changed by hand
        recorded = {}
    return build_graph(loaded.pipeline, None, loaded.positions, recorded)
