"""Evaluations: each target is a run that validates alone, in its own folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dagrl.config.loading.hub import hub_model
from dagrl.config.loading.loader import MODULES, load_pipeline
from dagrl.config.loading.yaml_source import dump_document
from dagrl.config.schema import Pipeline, RewardNode
from dagrl.orchestrator.folder.checkpoint import Checkpoints
from dagrl.orchestrator.folder.examine import PIPELINE
from dagrl.orchestrator.run import run_pipeline
from dagrl.tracking.console import Verbosity
from dagrl.validation.prepare import PreparedPipeline, prepare

_ALONE = (
    "run.val_only=true",
    "run.samples_per_step=1000000000",
    "run.keep_best=null",
    "run.stop_after=null",
    "run.warn_when=[]",
    "run.stop_when=[]",
    "track=[console]",
)
"""Everything is measured, nothing is trained, and nothing of the training run's records is touched."""


@dataclass(frozen=True, slots=True)
class Question:
    """Changes to the pipeline of each target."""

    data: tuple[Path, ...] = ()
    """Prompt files in place of the pipeline's validation sets."""
    n: int | None = None
    """Responses to each prompt. Default: the pipeline's."""
    agent: Mapping[str, object] | None = None
    """An environment as the agent of the rollout, which gives the rewards."""
    overrides: tuple[str, ...] = ()
    """Further keys of each pipeline."""


@dataclass(frozen=True, slots=True)
class Target:
    """Weights to evaluate."""

    name: str
    pipeline: Path
    checkpoint: Path | None = None
    """Default: the start weights."""
    is_made: bool = False
    """Whether the pipeline is that of `pipeline_of_model`, which has no prompts."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A target that is ready to run."""

    target: Target
    prepared: PreparedPipeline
    step: int
    """Step of the checkpoint; 0 for start weights."""


def targets_of(path: Path, steps: Sequence[str], made: Path, gpus: int) -> list[Target]:
    """The targets that an argument and ``--steps`` name: a pipeline file, a run folder, or a model.

    The pipelines of models are written to `made`. Raises ValueError if the path is none of them.
    """
    if (path / PIPELINE).is_file():
        return [_of_checkpoint(path, step) for step in steps or ("newest",)]
    if steps:
        raise ValueError(f"--steps names checkpoints of a run folder, and {path} is none; leave it out")
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        return [Target(path.stem, path)]
    if not (path / "config.json").is_file() and (path.exists() or hub_model(str(path)) is None):
        raise ValueError(
            f"{path} is neither a pipeline file, a run folder, a Hugging Face folder, nor a model of a hub (ORG/NAME)"
        )
    home = str(path.resolve()) if path.exists() else str(path)
    pipeline = pipeline_of_model({"path": home}, _generator(gpus), made / path.name, gpus)
    return [Target(path.name, pipeline, is_made=True)]


def target_of_endpoint(url: str, model: str, key: str | None, made: Path) -> Target:
    """The target of a model behind an OpenAI endpoint, whose tokens are not known: prompts and responses are bytes."""
    engine = {"backend": "endpoint", "url": url, "model_name": model, **({"api_key_env": key} if key else {})}
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    unused = {"model_type": "qwen3", **shape, "num_key_value_heads": 1, "max_position_embeddings": 10**8}
    name = model.replace("/", "--")
    path = pipeline_of_model({"init": unused, "tokenizer": {"kind": "messages"}}, engine, made / name, most=2**20)
    return Target(name, path, is_made=True)


def _of_checkpoint(folder: Path, wanted: str) -> Target:
    run = load_pipeline(folder / PIPELINE).pipeline.run
    checkpoints = Checkpoints(folder, run.keep, run.keep_best)
    steps, name = checkpoints.steps(), folder.resolve().name
    if wanted == "newest":
        found = checkpoints.of_step(steps[-1]) if steps else None
    elif wanted == "best":
        found = checkpoints.best()
    else:
        found = checkpoints.of_step(int(wanted)) if wanted.isdecimal() and int(wanted) in steps else None
    if found is None:
        there = f"its steps are {', '.join(map(str, steps))}" if steps else "there is none"
        raise ValueError(f"{folder} holds no checkpoint {wanted}; {there}")
    checkpoints.read(found)
    return Target(f"{name}-{found.name}", folder / PIPELINE, found)


def _generator(gpus: int) -> dict[str, object]:
    from importlib.util import find_spec

    served = next((name for name in ("sglang", "vllm") if find_spec(name)), "hf") if gpus else "hf"
    return {"backend": served}


def pipeline_of_model(
    model: Mapping[str, object], engine: Mapping[str, object], folder: Path, gpus: int = 0, most: int = 4096
) -> Path:
    """Write the pipeline of a model alone: it answers, and `math` scores the answers. Its modules are searched here.

    `most`: tokens of the longest prompt.
    """
    pipeline = {
        "name": folder.name,
        "model": dict(model),
        "data": {"prompts_per_step": 1, "max_prompt_tokens": most},
        "groups": {"rollout": {"gpus_per_node": gpus} if gpus else {"cpus_per_node": 1}},
        "engines": {"generator": {"group": "rollout", **engine}},
        "nodes": {
            "rollout": {"op": "rollout", "engine": "generator", "sampling": {"max_new_tokens": 4096}},
            "reward": {"op": "reward", "fn": "math"},
        },
        "run": {"steps": 0},
    }
    folder.mkdir(parents=True)
    (folder / MODULES).write_text(str(Path.cwd()))
    path = folder / PIPELINE
    path.write_text(dump_document(pipeline))
    return path


def prepared(target: Target, question: Question) -> Evaluation:
    """Check everything that needs no engine. Raises PipelineError with all problems; HubError."""
    overrides = [*_ALONE, *_data(target, question), *question.overrides]
    pipeline = load_pipeline(target.pipeline, overrides).pipeline
    overrides += [*_responses(pipeline, question.n), *_agent(pipeline, question.agent)]
    ready = prepare(target.pipeline, overrides, with_weights=True)
    step = int(target.checkpoint.name.removeprefix("step_")) if target.checkpoint else 0
    return Evaluation(target, ready, step)


def _data(target: Target, question: Question) -> Iterable[str]:
    if not question.data:
        if target.is_made:
            raise ValueError(f"{target.name} is a model alone; name its prompts with --data FILE")
        return
    paths = [str(path.resolve()) for path in question.data]
    names = dict(zip((path.stem for path in question.data), paths, strict=True))
    if len(names) < len(paths):
        raise ValueError("two files of --data have the same name; rename one of them")
    yield f"data.val={json.dumps(paths[0] if len(paths) == 1 else names)}"
    if target.is_made:
        # No training prompts are read, but a pipeline names some.
        yield f"data.train={json.dumps(paths)}"


def _responses(pipeline: Pipeline, n: int | None) -> Iterable[str]:
    if n is None:
        return
    rollout = pipeline.leading_rollout
    yield f"nodes.{rollout}.val_n={n}"
    for key, spec in pipeline.data.by_key.items():
        if key.startswith("val") and spec.n is not None:
            yield f"data.{key}.n={n}"
    if n > 1 and not pipeline.val_sampling(rollout).temperature:
        sampling = pipeline.rollouts[rollout].sampling
        temperature = sampling.temperature or 1.0
        text = sampling.model_copy(update={"temperature": temperature}).model_dump_json(exclude_unset=False)
        yield f"nodes.{rollout}.val_sampling={text}"


def _agent(pipeline: Pipeline, agent: Mapping[str, object] | None) -> Iterable[str]:
    if agent is None:
        return
    yield f"nodes.{pipeline.leading_rollout}.agent={json.dumps(agent)}"
    for name, node in pipeline.nodes.items():
        if isinstance(node, RewardNode):
            yield from (f"nodes.{name}.by_source=null", f"nodes.{name}.fn=agent")


def evaluate(evaluation: Evaluation, folder: Path, verbosity: Verbosity) -> None:
    """Sample and score in a new run folder. Raises RunError, RefusedFolderError."""
    checkpoint = evaluation.target.checkpoint
    if checkpoint is not None:
        place = folder / "checkpoints" / checkpoint.name
        place.parent.mkdir(parents=True)
        place.symlink_to(checkpoint.resolve(), target_is_directory=True)
    run_pipeline(evaluation.prepared, folder, verbosity)
