"""Checks whether a run may use a folder, before anything starts. The folder is not changed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dagrl.config.errors import PipelineError
from dagrl.config.loading.loader import MODULES
from dagrl.config.loading.yaml_source import read_document
from dagrl.config.schema import Pipeline
from dagrl.orchestrator.folder.checkpoint import Checkpoints, FoundCheckpoint
from dagrl.orchestrator.folder.identity import another_run, is_same_model, model_identity
from dagrl.tracking.metrics_file import kept_lines
from dagrl.workers.errors import RefusedFolderError

LOCK, PIPELINE, METRICS = ".lock", "pipeline.yaml", "metrics.jsonl"
_FILES = (LOCK, MODULES, PIPELINE, METRICS, "timeline.json", "workers.json", "checkpoints/best")
_FOLDERS = ("buffer", "checkpoints", "experience", "logs", "records", "samples")
_OTHERS = frozenset({LOCK, f"{PIPELINE}.new", "logs", "experience", "lost+found", ".gitignore", ".gitkeep"})
"""Entries that a folder may have before its first run: from an interrupted start, `dagrl launch`, explorers, a mount or
git."""
_WITH_FOLDER = ("tensorboard", "wandb", "mlflow", "swanlab")
"""Trackers with a folder of their name."""
_MOST_NAMED = 3
_ELSEWHERE = "give the run a new --run-dir"


def examine(
    path: Path, pipeline: Pipeline, resolved: Mapping[str, object], *, again: bool = False
) -> tuple[FoundCheckpoint, dict[str, object]]:
    """Check the folder of a run. Raises RefusedFolderError if the run may not use it.

    Returns the checkpoint to resume from and the resolved pipeline of the folder's run, empty if there is none.
    `resolved`: the pipeline as `dagrl.config.loading.loader` resolves it. `again`: the run continues after a
    failure, in the same folder, regardless of ``resume``.
    """
    checkpoints = Checkpoints(path, pipeline.run.keep)
    with _reading(path):
        entries = _entries(path)
        if not entries <= _OTHERS:
            _check_it_is_a_run(path, entries, checkpoints)
        _check_kinds(path, pipeline)
    earlier = _earlier(path) if PIPELINE in entries else {}
    if earlier and earlier.get("name") != (name := resolved.get("name")):
        raise RefusedFolderError(
            f"{path} holds the run `{earlier.get('name')}`, and this pipeline's name is `{name}`", hint=_ELSEWHERE
        )
    wanted = pipeline.run.val_only
    checkpoint = _find(checkpoints) if isinstance(wanted, bool) else _named(path, pipeline, wanted)
    with _reading(path):
        recorded = checkpoint.folder is not None or (METRICS in entries and (path / METRICS).stat().st_size > 0)
    if earlier and recorded and (other := another_run(earlier, resolved, with_model=checkpoint.folder is None)):
        raise RefusedFolderError(f"{path} holds {other}", hint=_ELSEWHERE)
    if checkpoint.folder and checkpoint.state:
        _check_checkpoint(pipeline, checkpoint, again or pipeline.run.only_validates)
    _check_metrics(path, checkpoint)
    return checkpoint, earlier


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"the run folder {path} cannot be used: {error.strerror}"
        raise RefusedFolderError(
            message, hint="check the path and its permissions, or give another --run-dir"
        ) from error


def _entries(path: Path) -> set[str]:
    for parent in path.absolute().parents:
        if _is_a_run(parent):
            raise RefusedFolderError(f"{path} is within {parent}, which holds a run", hint="choose a folder beside it")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise RefusedFolderError(f"{path} is a link to a folder that does not exist", hint=_ELSEWHERE) from None
        return set()
    if not stat.S_ISDIR(mode):
        raise RefusedFolderError(f"{path} is not a folder", hint="give --run-dir a folder, or the name of a new one")
    entries = {entry.name for entry in path.iterdir()}
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        raise RefusedFolderError(
            f"{path} may not be written to", hint="check its permissions, or give another --run-dir"
        )
    return entries


def _is_a_run(path: Path) -> bool:
    # A pipeline.yaml alone may be a user's own.
    return (path / PIPELINE).is_file() and ((path / LOCK).is_file() or (path / MODULES).is_file())


def _check_it_is_a_run(path: Path, entries: set[str], checkpoints: Checkpoints) -> None:
    if _is_a_run(path) or checkpoints.steps():
        return
    others = sorted(entries - _OTHERS)
    named = ", ".join(others[:_MOST_NAMED]) + (", ..." if len(others) > _MOST_NAMED else "")
    raise RefusedFolderError(f"{path} is not empty, and no run has written {named}", hint=_ELSEWHERE)


def _check_kinds(path: Path, pipeline: Pipeline) -> None:
    """Refuse files in place of folders and vice versa: a run would notice some of them only after hours."""
    profile = ("profile",) if pipeline.profile else ()
    folders = (*_FOLDERS, *(spec.tracker for spec in pipeline.trackers if spec.tracker in _WITH_FOLDER), *profile)
    # Also broken links.
    wrong = [name for name in folders if os.path.lexists(path / name) and not (path / name).is_dir()]
    _refuse_kinds(path, wrong, "folder")
    asides = [f"{name}.new" for name in _FILES if name != LOCK]
    wrong = [name for name in (*_FILES, *asides) if os.path.lexists(path / name) and not (path / name).is_file()]
    _refuse_kinds(path, wrong, "regular file")


def _refuse_kinds(path: Path, wrong: Iterable[str], kind: str) -> None:
    for name in wrong:
        raise RefusedFolderError(f"{path / name} is not a {kind}", hint=f"move it away, or {_ELSEWHERE}")


def _earlier(path: Path) -> dict[str, object]:
    try:
        document = read_document(path / PIPELINE)
    except PipelineError as error:
        why = error.problems[0].message
    else:
        if not document.problems and "name" in document.tree:
            return document.tree
        why = document.problems[0].message if document.problems else "has no `name`"
    raise RefusedFolderError(
        f"{path / PIPELINE} does not tell which run the folder holds: {why.partition('; ')[0]}",
        hint=f"put the file back, or {_ELSEWHERE}",
    )


def _find(checkpoints: Checkpoints) -> FoundCheckpoint:
    try:
        checkpoint = checkpoints.find()
    except ValueError as error:
        raise RefusedFolderError(
            str(error), hint="go on with the dagrl that wrote it, or give the run a new --run-dir"
        ) from error
    if checkpoint.torn and not checkpoint.folder:
        # A new run would delete all metrics.
        raise RefusedFolderError(
            ", and ".join(checkpoint.torn.values()),
            hint="put a whole checkpoint there, or give the run a new --run-dir to begin anew",
        )
    return checkpoint


def _named(path: Path, pipeline: Pipeline, wanted: int | str) -> FoundCheckpoint:
    """The checkpoint of a step, or the best one. Raises RefusedFolderError if there is none, or it is torn."""
    best, newest = pipeline.run.keep_best, "or validate the newest, with run.val_only=true"
    checkpoints = Checkpoints(path, pipeline.run.keep, best)
    if wanted == "best":
        folder = checkpoints.best()
        if folder is None:
            measured = f"none was measured by {best.metric}" if best else "run.keep_best is not set"
            raise RefusedFolderError(f"{path} holds no best checkpoint: {measured}", hint=f"name a step, {newest}")
    else:
        assert isinstance(wanted, int)
        folder, steps = checkpoints.of_step(wanted), checkpoints.steps()
        if wanted not in steps:
            there = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
            raise RefusedFolderError(
                f"{path} holds no checkpoint of step {wanted}", hint=f"{there}; name one, {newest}"
            )
    try:
        return FoundCheckpoint(folder, checkpoints.read(folder), {})
    except ValueError as error:
        raise RefusedFolderError(str(error), hint=f"name another step, {newest}") from error


def _check_checkpoint(pipeline: Pipeline, checkpoint: FoundCheckpoint, again: bool) -> None:
    assert checkpoint.folder and checkpoint.state
    if pipeline.run.resume == "never" and not again:
        raise RefusedFolderError(
            f"{checkpoint.folder.parent.parent} holds a checkpoint of step {checkpoint.state.step} and the pipeline "
            "says resume: never",
            hint="say resume: auto, or give the run a new --run-dir",
        )
    if not is_same_model(checkpoint.state.model, model_identity(pipeline)):
        raise RefusedFolderError(
            f"{checkpoint.folder} holds another model than the pipeline's",
            hint="give the run a new --run-dir, or put model (and run.seed, where it starts from random weights) back",
        )


def _check_metrics(path: Path, checkpoint: FoundCheckpoint) -> None:
    metrics = path / METRICS
    try:
        if metrics.is_file():
            kept_lines(metrics, checkpoint.state.step if checkpoint.state else None)
    except OSError as error:
        raise RefusedFolderError(f"{metrics} cannot be read: {error.strerror}", hint=_ELSEWHERE) from error
    except ValueError as error:
        raise RefusedFolderError.of(str(error)) from error
