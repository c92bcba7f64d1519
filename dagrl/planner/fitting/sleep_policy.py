"""``sleep: auto`` where the file says what GPUs a group has: engines live together where all fit, else in turns."""

from __future__ import annotations

from dataclasses import replace

from dagrl.config.schema import Pipeline
from dagrl.graph.dag import Graph
from dagrl.graph.sleeping import neighbours
from dagrl.planner.fitting.fit import GroupFit, fit
from dagrl.validation import CheckedPipeline

ROOM = 0.92
"""Of a GPU that engines may fill together: the rest is for what estimates do not see."""


def decide_sleep(checked: CheckedPipeline) -> CheckedPipeline:
    """The same with `with_sleep_decided`."""
    pipeline = with_sleep_decided(checked.loaded.pipeline, checked.graph)
    return replace(checked, loaded=replace(checked.loaded, pipeline=pipeline))


def with_sleep_decided(pipeline: Pipeline, graph: Graph) -> Pipeline:
    """The pipeline with ``sleep: false`` for the engines of groups in which the plan finds room for all at once.

    Engines that say themselves whether they sleep are left alone, and so are groups that do not say their GPUs.
    """
    for name, group in pipeline.groups.items():
        undecided = [
            engine
            for engine, spec in pipeline.engines.items()
            if spec.group == name and spec.sleep == "auto" and neighbours(pipeline, engine)
        ]
        if group.is_cpu or group.gpu is None or not undecided:
            continue
        together = _awake(pipeline, undecided)
        if _has_room(together, graph, name):
            pipeline = together
    return pipeline


def _awake(pipeline: Pipeline, engines: list[str]) -> Pipeline:
    changed = {name: pipeline.engines[name].model_copy(update={"sleep": False}) for name in engines}
    return pipeline.model_copy(update={"engines": {**pipeline.engines, **changed}})


def _has_room(pipeline: Pipeline, graph: Graph, group: str) -> bool:
    try:
        found = fit(pipeline, graph)
    except ValueError:
        # Of a model that nobody here knows, nothing is promised.
        return False
    return _is_roomy(next(each for each in found.groups if each.name == group))


def _is_roomy(group: GroupFit) -> bool:
    full = group.fullest
    assert group.gpu is not None and full is not None, f"the engines of {group.name} live on GPUs that are known"
    return not list(group.problems()) and full.total <= ROOM * group.gpu.memory_bytes
