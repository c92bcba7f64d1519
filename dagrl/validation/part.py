"""One part of a pipeline for `dagrl run --only`: a pipeline with the graph of that part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dagrl.backends.registry import backend_of
from dagrl.config.schema import EngineSpec, Pipeline
from dagrl.config.share import ALL, Share
from dagrl.graph.cut import Cut, PartError, cut
from dagrl.graph.dag import SAMPLES_NODE, Graph
from dagrl.scheduler.plan import Plan
from dagrl.validation import CheckedPipeline


@dataclass(frozen=True, slots=True)
class PartOptions:
    """Options of `dagrl run` for a part."""

    only: tuple[str, ...]
    """Nodes of the part."""
    share: Share = ALL
    """Only for an explorer."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a pipeline."""

    cut: Cut
    share: Share
    sources: Mapping[str, str]
    """Generator -> the engine of the other part whose weights it takes."""

    @property
    def explores(self) -> bool:
        return self.cut.explores

    def run_folder(self, whole: Path) -> Path:
        """The folder of this part in a run whose trainer has the folder `whole`."""
        return whole.with_name(f"{whole.name}-explorer-{self.share}") if self.explores else whole

    def most_ahead(self, pipeline: Pipeline) -> int:
        """Batches that may wait for the trainer when an explorer starts one, so that no batch is too old when it is
        used.

        The other explorers may each work on one more.
        """
        return pipeline.schedule.max_staleness - (self.share.of - 1)

    def scheduled(self, plan: Plan, pipeline: Pipeline) -> Plan:
        """The plan with the number of concurrent steps of this part."""
        alone = not self.explores or self.share.of == 1
        return replace(plan, max_staleness=min(1, pipeline.schedule.max_staleness) if alone else 0)


def take_part(checked: CheckedPipeline, options: PartOptions) -> tuple[CheckedPipeline, Part]:
    """One part of a pipeline. PartError if it does not exist."""
    whole, share = checked.loaded.pipeline, options.share
    found = cut(checked.graph, whole, options.only)
    graph = found.graph
    used = _used(whole, graph)
    sources = {
        name: spec.weights_from
        for name, spec in whole.engines.items()
        if name in used and spec.weights_from and spec.weights_from not in used
    }
    part = Part(found, share, sources)
    _check(whole, part)
    run: dict[str, object] = {}
    if part.explores:
        # Its state is small, and saved batches are not sampled again.
        run |= {"save_every": 1, "async_save": False, "keep_best": None}
    if not part.explores or SAMPLES_NODE not in graph.nodes:
        run |= {"validate_every": None, "validate_first": False}
    engines = {name: spec if name in used else _without_ranks(spec) for name, spec in whole.engines.items()}
    engines |= {name: _on_its_own(whole, name) for name in sources}
    groups = {name: group for name, group in whole.groups.items() if any(engines[e].group == name for e in used)}
    update = {"engines": engines, "groups": groups, "run": whole.run.model_copy(update=run)}
    pipeline = whole.model_copy(update=update)
    return replace(checked, loaded=replace(checked.loaded, pipeline=pipeline), graph=graph), part


def policies_sent(pipeline: Pipeline) -> list[str]:
    """The trained engines whose weights generators take."""
    return list(dict.fromkeys(spec.weights_from for spec in pipeline.engines.values() if spec.weights_from))


def starts_from_model(pipeline: Pipeline, engine: str) -> bool:
    """Whether a trained engine starts with its model's initial weights, like all engines of the model."""
    return backend_of(pipeline.engines[engine]).start_folder(pipeline.engines[engine]) is None


def _check(pipeline: Pipeline, part: Part) -> None:
    schedule = pipeline.schedule
    if not part.explores and part.share.of > 1:
        raise PartError("--explorer is for parts that write experience, and this one is trained on it; leave it out")
    if pipeline.run.only_validates:
        raise PartError("--only: a part of a pipeline cannot only validate; set run.val_only=false, or leave it out")
    if pipeline.run.record is not None:
        raise PartError("--only: nodes of a part cannot be recorded; set run.record=null")
    for name in policies_sent(pipeline):
        if pipeline.engines[name].sent_adapter is not None:
            raise PartError(f"--only: `{name}` sends adapters, and explorers take whole weights; set lora.merge: true")
    for name, engine in pipeline.engines.items():
        if engine.weights_from and engine.taken_fp8 is not None:
            raise PartError(
                f"--only: `{name}` receives weights in fp8, but files hold the trainer's format; remove that"
            )
    others, interval = (part.share.of - 1 if part.explores else 0), schedule.weights_every or 1
    if (needed := others + interval - 1) > schedule.max_staleness:
        several = f"with {part.share.of} explorers" if others else ""
        rarely = f"with schedule.weights_every {interval}" if interval > 1 else ""
        why = " and ".join(filter(None, (several, rarely)))
        raise PartError(
            f"--only: {why}, samples get {needed} policy versions old; set schedule.max_staleness={needed} or more"
        )


def _used(whole: Pipeline, graph: Graph) -> set[str]:
    """The engines of a part, and the engines whose ranks they use."""
    used = {engine for node in graph.nodes.values() if (engine := getattr(node.spec, "engine", None))}
    return used | {home for engine in used if (home := whole.engines[engine].frozen_copy_of)}


def _without_ranks(engine: EngineSpec) -> EngineSpec:
    return engine.model_copy(update={"group": None, "frozen_copy_of": None})


def _on_its_own(whole: Pipeline, name: str) -> EngineSpec:
    return whole.engines[name].model_copy(update={"weights_from": None, "model": whole.model_of(name)})
