"""The folder of one run: who writes to it, and whether there is something to go on from."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from dagrl.runtime.errors import RunError
from dagrl.runtime.folder.changes import changes
from dagrl.runtime.folder.checkpoint import Checkpoints, Found, RunState
from dagrl.spec.schema import Pipeline
from dagrl.track.base import replace_text

_MODULES = ".modules"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder, held by this process alone."""

    path: Path
    checkpoints: Checkpoints
    resumed: RunState | None
    """Where an earlier run got to."""
    resumed_from: Path | None
    torn: tuple[str, ...] = ()
    """Of newer checkpoints that are not whole, what is wrong with each, and where they were put."""
    changed: str = ""
    """What of the pipeline is another than it was in the run that is gone on with."""

    def keep_details(self, error: RunError) -> None:
        """Keep the traceback of a worker where a developer finds it, and off the terminal."""
        if error.details:
            log = self.path / "logs" / "failure.txt"
            with suppress(OSError):  # on a full disk the sentence on the terminal is what remains
                log.parent.mkdir(exist_ok=True)
                log.write_text(error.details)
                error.log = str(log)


@contextmanager
def open_run_folder(
    path: Path, pipeline: Pipeline, resolved: str, *, modules: Path | None = None, again: bool = False
) -> Iterator[RunFolder]:
    """Take `path` for this run and write the resolved pipeline, as YAML, there. At the end no torn checkpoint stays.

    `modules`: the folder of the user's own, which is noted for `modules_of`.
    `again`: what is there is this run's own, which it goes on from after a failure, whatever ``resume`` says.

    RunError where another process holds it, where it cannot be written, where ``resume: never`` finds a checkpoint,
    where there are checkpoints and none is whole, or where the newest belongs to another model or cannot be read.
    """
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("a+")
    with lock:
        _take(lock, path)
        checkpoints = Checkpoints(path, pipeline.run.keep, pipeline.run.keep_best)
        checkpoints.remove_torn()
        found = _find(checkpoints)
        if found.folder and found.state:
            _check(pipeline, found.folder, found.state, again)
        with _writing(path):
            torn = tuple(f"{what}; it is now {checkpoints.set_aside(each).name}" for each, what in found.torn.items())
            changed = changes(_before(path), resolved) if found.state else ""
            aside = path / ".pipeline.yaml"
            aside.write_text(resolved)
            aside.replace(path / "pipeline.yaml")
            if modules is not None:
                replace_text(path / _MODULES, f"{modules.resolve()}\n")
        try:
            yield RunFolder(path, checkpoints, found.state, found.folder, torn, changed)
        finally:
            # Of a save that has failed; whoever wrote it is gone.
            checkpoints.remove_torn()


def modules_of(path: Path) -> Path:
    """Where the user's own modules of the run in a folder are: where its pipeline file was, as far as that is known."""
    try:
        return Path((path / _MODULES).read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        return path


def model_identity(pipeline: Pipeline) -> str:
    """What a checkpoint's weights belong to, and the reference beside them, as text that can be compared."""
    megatron = {name: engine for name, engine in sorted(pipeline.engines.items()) if engine.backend == "megatron"}
    own = {name: pipeline.model_of(name) for name, engine in megatron.items() if engine.model is not None}
    drawn = pipeline.model.init or any(model.init for model in own.values())
    seed = f", start weights drawn from seed {pipeline.run.seed}" if drawn else ""
    of_engines = "".join(f", {name} is {model.model_dump_json(exclude_none=True)}" for name, model in own.items())
    stored = "".join(
        f", {name} from {engine.dist_checkpointing_path}"
        for name, engine in megatron.items()
        if engine.dist_checkpointing_path
    )
    return pipeline.model.model_dump_json(exclude_none=True) + seed + of_engines + stored


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write to the run folder {path}: {error.strerror}") from error


def _before(path: Path) -> str:
    """The pipeline that the folder's run had; nothing where it cannot be read."""
    try:
        return (path / "pipeline.yaml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _find(checkpoints: Checkpoints) -> Found:
    try:
        found = checkpoints.find()
    except ValueError as error:
        raise RunError(
            str(error), hint="go on with the dagrl that wrote it, or give the run a new --run-dir"
        ) from error
    if found.torn and not found.folder:
        # To begin anew would throw away all the metrics that there are.
        raise RunError(
            "; ".join(found.torn.values()),
            hint="put a whole checkpoint there, or give the run a new --run-dir to begin anew",
        )
    return found


def _take(lock: TextIO, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        raise RunError(
            f"another run (pid {holder}) is writing to {path}", hint="wait for it, or give this one its own --run-dir"
        ) from error
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()


def _check(pipeline: Pipeline, newest: Path, state: RunState, again: bool) -> None:
    if pipeline.run.resume == "never" and not again:
        raise RunError(
            f"{newest.parent.parent} holds a checkpoint of step {state.step} and the pipeline says resume: never",
            hint="say resume: auto, or give the run a new --run-dir",
        )
    if state.model != model_identity(pipeline):
        raise RunError(
            f"{newest} holds another model than the pipeline's",
            hint="give the run a new --run-dir, or put model (and run.seed, where it starts from random weights) back",
        )
