"""Weights out of a run, and between formats: whole folders, written aside and renamed into place.

One process, on the CPU, one tensor at a time: neither the run's layout nor its GPUs are needed.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dagrl.backends.registry import backend_of, backends
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema import KeepBestSpec, ModelSpec, Pipeline, TrainingNode
from dagrl.model_files.hf_config import folder_config
from dagrl.orchestrator.folder.checkpoint import Checkpoints, TornCheckpointError
from dagrl.validation.model_weights import check_model_folder

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write where a disk, a quota or the shell's limit is full."""


def export_run(
    run: Path, output: Path, *, step: int | None, engine: str | None, best: bool = False, adapter: bool = False
) -> str:
    """Write the policy of a run as a Hugging Face folder, or its `adapter` as a PEFT folder; returns a line about it.

    Exports the newest checkpoint, the one of `step`, or the `best` one. ValueError if an argument names nothing to
    export, OSError if the export fails.
    """
    file = run / "pipeline.yaml"
    if not file.is_file():
        raise ValueError(f"{run} is no run folder: it has no pipeline.yaml; name the --run-dir of `dagrl run`")
    pipeline = load_pipeline(file).pipeline
    name = _engine(pipeline, engine)
    checkpoint = _checkpoint(run, step, pipeline.run.keep_best, best=best)
    folder = checkpoint / name
    if not folder.is_dir():
        raise ValueError(f"{checkpoint} holds no engine {name!r}; was the pipeline another one then?")
    trained = pipeline.engines[name]
    with _new_folder(output) as aside:
        model, backend = pipeline.model_of(name), backend_of(trained)
        if adapter:
            backend.write_adapter(folder, model, aside, trained)
        else:
            backend.write_hf(folder, model, aside, trained, pipeline.run.seed)
    return f"{output}: {name} after step {int(checkpoint.name.removeprefix('step_'))} of {run}"


def convert(source: Path, output: Path, to: str, model: Path | None = None) -> str:
    """Convert between a Hugging Face folder and the own format of a backend, `to` ``hf`` or that backend.

    `model` is a Hugging Face folder with config and tokenizer, for `to` ``hf``. Raises as `export_run`.
    """
    if to != "hf":
        with _new_folder(output) as aside:
            check_model_folder(source)
            backends()[to].write_own(source, aside)
        return f"{output}: {source} for {to}"
    assert model is not None, "converting to Hugging Face needs a model's folder"
    if not source.is_dir():
        what = "is a file, not a folder" if source.exists() else "does not exist"
        raise ValueError(f"{source} {what}; name the folder of one step")
    backend = next((backend for backend in backends().values() if backend.owns_folder(source)), None)
    if backend is None:
        raise ValueError(
            f"{source} is in no backend's own format; name the folder of one step, as iter_0000100 or "
            "checkpoints/step_10/ENGINE"
        )
    folder_config(model)
    with _new_folder(output) as aside:
        backend.write_hf(source, ModelSpec(path=model), aside)
    return f"{output}: {source} for Hugging Face"


def policies(pipeline: Pipeline) -> list[str]:
    """The engines that are exported by default: all trained ones, except critics beside policies."""
    trained = _trained(pipeline)
    return [name for name in trained if pipeline.engines[name].head == "lm"] or trained


def _trained(pipeline: Pipeline) -> list[str]:
    return sorted({node.engine for node in pipeline.nodes.values() if isinstance(node, TrainingNode)})


def _engine(pipeline: Pipeline, wanted: str | None) -> str:
    trained, named = _trained(pipeline), policies(pipeline)
    if wanted is None and len(named) > 1:
        raise ValueError(f"the run trains {', '.join(named)}; say which one with --engine")
    name = named[0] if wanted is None else wanted
    if name not in trained:
        raise ValueError(f"the run trains no engine {name!r}; it trains {', '.join(trained)}")
    return name


def _checkpoint(run: Path, step: int | None, keep_best: KeepBestSpec | None, *, best: bool) -> Path:
    checkpoints = Checkpoints(run, keep=1, keep_best=keep_best)
    steps = checkpoints.steps()
    if not steps:
        raise ValueError(f"{run} holds no checkpoint yet; set run.save_every, or wait for the run's end")
    if step is not None and step not in steps:
        raise ValueError(f"{run} holds no checkpoint of step {step}; it holds {', '.join(map(str, steps))}")
    folder = checkpoints.of_step(steps[-1] if step is None else step)
    if best:
        folder = _best(run, checkpoints, keep_best)
    try:
        checkpoints.read(folder)
    except TornCheckpointError as error:
        others = [str(other) for other in steps if checkpoints.of_step(other) != folder]
        raise OSError(f"{error}" + (f"; --step {' or '.join(others)} may be whole" if others else "")) from error
    return folder


def _best(run: Path, checkpoints: Checkpoints, keep_best: KeepBestSpec | None) -> Path:
    if keep_best is None:
        raise ValueError(f"{run} keeps no best checkpoint; set run.keep_best before the run, or name a --step")
    folder = checkpoints.best()
    if folder is None:
        raise ValueError(f"no checkpoint of {run} was measured by {keep_best.metric} yet; name a --step")
    return folder


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `output` at the end; nothing is left of it after a failure."""
    if output.exists() and not (output.is_dir() and next(output.iterdir(), None) is None):
        raise ValueError(f"{output} exists and is not empty; name a new folder")
    aside = output.parent / f".{output.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        raise ValueError(f"cannot make the folder {output}: {error.strerror}; name another") from error
    try:
        yield aside
        aside.rename(output)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise OSError(f"cannot write {output}: {error.strerror}; make room, or name another folder") from error
        if aside.exists():
            raise
        raise OSError(f"cannot make the folder {output}: {error.strerror}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
