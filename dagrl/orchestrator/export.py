"""Weights out of a run, and between formats: whole folders, written aside and renamed into place.

One process, on the CPU, one tensor at a time: neither the run's layout nor its GPUs are needed.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema import KeepBestSpec, ModelSpec, Pipeline, TrainingNode
from dagrl.orchestrator.folder.checkpoint import Checkpoints, TornCheckpointError
from dagrl.orchestrator.weight_folders import WrongCallError, check_is_hf, check_is_megatron
from dagrl.validation.model_weights import folder_problem

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a write says where a disk, a quota or the shell's limit is full."""


def export_run(run: Path, output: Path, *, step: int | None, engine: str | None, best: bool = False) -> str:
    """Write the policy of a run as a Hugging Face folder; says what was done.

    At its newest checkpoint, or that of `step`, or the `best` one.
    WrongCallError where an argument names nothing, ValueError or OSError where the export fails.
    """
    file = run / "pipeline.yaml"
    if not file.is_file():
        raise WrongCallError(f"{run} is no run folder: it has no pipeline.yaml; name the --run-dir of `dagrl run`")
    pipeline = load_pipeline(file).pipeline
    name = _engine(pipeline, engine)
    checkpoint = _checkpoint(run, step, pipeline.run.keep_best, best=best)
    folder = checkpoint / name
    if not folder.is_dir():
        raise WrongCallError(f"{checkpoint} holds no engine {name!r}; was the pipeline another one then?")
    trained = pipeline.engines[name]
    assert isinstance(trained, MegatronEngineSpec)
    with _new_folder(output) as aside:
        _megatron_to_hf(folder, pipeline.model_of(name), aside, trained.head)
    return f"{output}: {name} after step {int(checkpoint.name.removeprefix('step_'))} of {run}"


def convert_to_hf(source: Path, model: Path, output: Path) -> str:
    """Write a Megatron folder as a Hugging Face folder, with config and tokenizer of the Hugging Face folder `model`.

    Raises as `export_run`.
    """
    check_is_megatron(source)
    check_is_hf(model)
    with _new_folder(output) as aside:
        _megatron_to_hf(source, ModelSpec(path=model), aside)
    return f"{output}: {source} for Hugging Face"


def convert_to_megatron(source: Path, output: Path) -> str:
    """Write a Hugging Face folder in Megatron's distributed format, as Megatron-LM loads it. Raises as `export_run`."""
    check_is_hf(source)
    with _new_folder(output) as aside:
        if problem := folder_problem(source):
            raise WrongCallError(problem)
        from dagrl.backends.megatron.engine.convert import write_megatron
        from dagrl.backends.model_source import load_hf_config, weight_source
        from dagrl.models.vocabulary import padded_vocab_size

        model = ModelSpec(path=source)
        config = load_hf_config(model)
        write_megatron(weight_source(model, seed=0), config, padded_vocab_size(config.vocab_size, 1), aside)
    return f"{output}: {source} for Megatron"


def _megatron_to_hf(source: Path, model: ModelSpec, folder: Path, head: str = "lm") -> None:
    from transformers.models.auto import modeling_auto

    from dagrl.backends.hf_folder import copy_tokenizer, write_hf_folder
    from dagrl.backends.megatron.engine.convert import StoredModel
    from dagrl.backends.model_source import load_hf_config

    config = load_hf_config(model)
    stored = StoredModel(source, config, head)
    if head == "lm":
        classes = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    else:
        # Hugging Face has no class of critics: a value head, too, is a classifier's with one label.
        classes = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
        config.num_labels = 1
    if config.model_type not in classes:
        raise ValueError(f"Hugging Face has no class for a {config.model_type} with a {head} head")
    write_hf_folder(folder, config, classes[config.model_type], stored.tensors())
    copy_tokenizer(model, folder)


def policies(pipeline: Pipeline) -> list[str]:
    """The engines that are exported without being named: all that are trained, but for critics beside policies."""
    trained = _trained(pipeline)
    return [name for name in trained if getattr(pipeline.engines[name], "head", "lm") == "lm"] or trained


def _trained(pipeline: Pipeline) -> list[str]:
    return sorted({node.engine for node in pipeline.nodes.values() if isinstance(node, TrainingNode)})


def _engine(pipeline: Pipeline, wanted: str | None) -> str:
    trained, found = _trained(pipeline), policies(pipeline)
    if wanted is None and len(found) > 1:
        raise WrongCallError(f"the run trains {', '.join(found)}; say which one with --engine")
    name = found[0] if wanted is None else wanted
    if name not in trained:
        raise WrongCallError(f"the run trains no engine {name!r}; it trains {', '.join(trained)}")
    return name


def _checkpoint(run: Path, step: int | None, keep_best: KeepBestSpec | None, *, best: bool) -> Path:
    checkpoints = Checkpoints(run, keep=1, keep_best=keep_best)
    steps = checkpoints.steps()
    if not steps:
        raise WrongCallError(f"{run} holds no checkpoint yet; set run.save_every, or wait for the run's end")
    if step is not None and step not in steps:
        raise WrongCallError(f"{run} holds no checkpoint of step {step}; it holds {', '.join(map(str, steps))}")
    folder = checkpoints.of_step(steps[-1] if step is None else step)
    if best:
        folder = _best(run, checkpoints, keep_best)
    try:
        checkpoints.read(folder)
    except TornCheckpointError as error:
        others = [str(other) for other in steps if checkpoints.of_step(other) != folder]
        raise ValueError(f"{error}" + (f"; --step {' or '.join(others)} may be whole" if others else "")) from error
    return folder


def _best(run: Path, checkpoints: Checkpoints, keep_best: KeepBestSpec | None) -> Path:
    if keep_best is None:
        raise WrongCallError(f"{run} keeps no best checkpoint; set run.keep_best before the run, or name a --step")
    folder = checkpoints.best()
    if folder is None:
        raise WrongCallError(f"no checkpoint of {run} was measured by {keep_best.metric} yet; name a --step")
    return folder


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `output` at the end; nothing is left of it after a failure."""
    if output.exists() and not (output.is_dir() and next(output.iterdir(), None) is None):
        raise WrongCallError(f"{output} exists and is not empty; name a new folder")
    aside = output.parent / f".{output.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
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
