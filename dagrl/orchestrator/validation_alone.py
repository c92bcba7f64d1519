"""A run that only validates: the engines that it starts, and the weights that they take."""

from __future__ import annotations

from dataclasses import replace

from dagrl.backends.registry import backend_of
from dagrl.config.schema import EngineSpec, Pipeline
from dagrl.orchestrator.folder.checkpoint import RunState
from dagrl.validation import CheckedPipeline
from dagrl.validation.prepare import PreparedPipeline, placed


def plan_validation(checked: CheckedPipeline, validated: RunState | None) -> PreparedPipeline:
    """The pipeline of a run that validates a checkpoint, or the start weights: None."""
    pipeline = checked.loaded.pipeline
    # Records and profiles belong to steps of training.
    update: dict[str, object] = {"run": pipeline.run.model_copy(update={"record": None}), "profile": None}
    if validated is None:
        engines = {name: _on_start_weights(pipeline, name) for name in pipeline.engines}
        update["engines"] = engines
    loaded = replace(checked.loaded, pipeline=pipeline.model_copy(update=update))
    prepared = placed(replace(checked, loaded=loaded))
    return replace(prepared, plan=replace(prepared.plan, steps=validated.step if validated else 0))


def _on_start_weights(pipeline: Pipeline, name: str) -> EngineSpec:
    """The section of an engine that loads a model's folder itself, if those weights are what it would be sent."""
    engine = pipeline.engines[name]
    source = pipeline.engines.get(engine.weights_from or "")
    if source is None or pipeline.model_of(name).path is None or backend_of(source).start_folder(source):
        return engine
    return engine.model_copy(update={"weights_from": None, "model": pipeline.model_of(name)})
