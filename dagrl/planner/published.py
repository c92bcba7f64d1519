"""Published models in place of missing folders, so that this machine can plan the run of another one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dagrl.config.errors import Place, dotted
from dagrl.config.loading.hub import known_model
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.loading.published_configs import published_name
from dagrl.config.schema import ModelSpec


def with_published_models(path: Path | str, overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides, with further ones for each missing folder with the name of a published model, and notes on these.

    ``~/models/Qwen3-8B`` becomes Qwen/Qwen3-8B, whose sizes dagrl knows; nothing is fetched. PipelineError if the file
    cannot be loaded.
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
            notes.append(f"{model.path} does not exist, so the plan uses {known}")
    return published, notes
