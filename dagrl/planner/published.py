"""Published models in place of folders that are not on this machine, so that it can plan a run of another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from dagrl.config.errors import Place, dotted
from dagrl.config.loading.hub import known_model
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.loading.published_configs import published_name
from dagrl.config.schema import ModelSpec, Pipeline


def with_published_models(path: Path | str, overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides, and further ones for each missing folder with the name of a published model; and what they are.

    ``~/models/Qwen3-8B`` is taken for Qwen/Qwen3-8B, of which dagrl knows the sizes: nothing is fetched. PipelineError
    if the file cannot be loaded.
    """
    pipeline = load_pipeline(path, overrides).pipeline
    published, notes = list(overrides), []
    for place, model in _models(pipeline):
        name = published_name(model.path.name) if model.path is not None and not model.path.exists() else None
        if name is not None:
            published.append(f"{dotted((*place, 'path'))}={known_model(name)}")
            notes.append(f"{model.path} does not exist, so the plan is that of {name}")
    return published, notes


def _models(pipeline: Pipeline) -> Iterator[tuple[Place, ModelSpec]]:
    yield ("model",), pipeline.model
    for name, engine in pipeline.engines.items():
        if engine.model is not None:
            yield ("engines", name, "model"), engine.model
