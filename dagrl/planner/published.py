"""Published models in place of folders that are not on this machine, so that it can plan a run of another one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dagrl.config.errors import Place, dotted
from dagrl.config.loading.hub import known_model
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.loading.published_configs import published_name
from dagrl.config.schema import ModelSpec


def with_published_models(path: Path | str, overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides, and further ones for each missing folder with the name of a published model; and what they are.

    ``~/models/Qwen3-8B`` is taken for Qwen/Qwen3-8B, of which dagrl knows the sizes: nothing is fetched. PipelineError
    if the file cannot be loaded.
    """
    pipeline = load_pipeline(path, overrides).pipeline
    published, notes = list(overrides), []
    models: dict[Place, ModelSpec | None] = {("model",): pipeline.model}
    for name, engine in pipeline.engines.items():
        models["engines", name, "model"] = engine.model
    for place, model in models.items():
        if model is None or model.path is None or model.path.exists():
            continue
        if known := published_name(model.path.name):
            published.append(f"{dotted((*place, 'path'))}={known_model(known)}")
            notes.append(f"{model.path} does not exist, so the plan is that of {known}")
    return published, notes
