"""A whole pipeline file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dagrl.config.schema.backends import AnyEngineSpec
from dagrl.config.schema.model import DataSpec, GroupSpec, ModelSpec
from dagrl.config.schema.nodes import NodeSpec
from dagrl.config.schema.run import ProfileSpec, RunSpec, ScheduleSpec, TrackerName, TrackerSpec
from dagrl.config.schema.section import Name, OwnFunction, Section


class Pipeline(Section):
    """A whole pipeline file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
    """Names the run folder and the tracker's run."""
    model: ModelSpec
    """The policy."""
    data: DataSpec
    """The prompts."""
    groups: Annotated[dict[Name, GroupSpec], Field(min_length=1)]
    """GPUs or CPU slots, by name."""
    engines: Annotated[dict[Name, AnyEngineSpec], Field(min_length=1)]
    """Models with a layout on a group, by name."""
    nodes: Annotated[dict[Name, NodeSpec], Field(min_length=1)]
    """The stages of a step, by name."""
    schedule: ScheduleSpec = ScheduleSpec()
    """How steps overlap."""
    run: RunSpec
    """How long, how often, how safely."""
    profile: ProfileSpec | None = None
    """Traces of some steps."""
    track: tuple[TrackerName | OwnFunction | TrackerSpec, ...] = ("console",)
    """Trackers of metrics and tables of samples, beside metrics.jsonl: names, your own as ``module:Class``, or sections
    with settings."""

    @property
    def trackers(self) -> tuple[TrackerSpec, ...]:
        """`track` as sections."""
        return tuple(TrackerSpec(tracker=each) if isinstance(each, str) else each for each in self.track)

    def model_section(self, engine: str) -> tuple[str, ...]:
        """Section of an engine's model: its own, that of the engine it has its weights from, or the pipeline's."""
        spec = self.engines[engine]
        home = spec.frozen_copy_of or spec.weights_from
        holders = [engine, *([home] if home in self.engines else [])]
        own = next((name for name in holders if self.engines[name].model is not None), None)
        return ("engines", own, "model") if own else ("model",)

    def model_of(self, engine: str) -> ModelSpec:
        """The model of an engine. Random weights have the pipeline's tokenizer where they name none."""
        section = self.model_section(engine)
        own = self.engines[section[1]].model if len(section) > 1 else None
        if own is None:
            return self.model
        if own.path is None and own.tokenizer is None:
            return own.model_copy(update={"tokenizer": self.model.tokenizer or self.model.path})
        return own
