"""The smallest change to a pipeline that makes it fit, found by trying the cheapest changes first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import reduce
from operator import or_
from typing import Any

from dagrl.backends.fit import Fit, group_fit
from dagrl.backends.planning.changes import Edit, Ladder, Room, doubled
from dagrl.backends.planning.gpus import GPUS_OF_MACHINE
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.backends.registry import backend_of
from dagrl.config.errors import Place
from dagrl.config.schema import EngineSpec, Pipeline
from dagrl.graph.dag import Graph
from dagrl.scheduler.placement import make_plan

_MOST_TOGETHER = 2
"""Number of changes that are tried in all combinations; further ones are added one by one, the best first."""
_MOST_IN_A_ROW = 10
_MOST_CHECKED = 20
"""Number of fitting changes that are validated, which takes longer."""
_MOST_MACHINES = 128


def nearest_change(
    graph: Graph, fit: Fit, *, gpu: str, is_valid: Callable[[Edit], bool] = lambda change: True
) -> Edit | None:
    """Return the smallest change with which all engines fit; None if no tried change does.

    `is_valid` tells whether the file still passes its checks.
    """
    if not fit.problems:
        return None
    nearest = Edit({})
    # Groups have no GPU in common, so each is changed separately.
    for group in sorted({problem.group for problem in fit.problems}):
        attempts = itertools.islice(_attempts(graph, fit, group, gpu), _MOST_CHECKED)
        valid = (both for change in attempts if is_valid(both := nearest | change))
        if (helped := next(valid, None)) is None:
            return None
        nearest = helped
    return nearest


def _attempts(graph: Graph, fit: Fit, name: str, gpu: str) -> Iterator[Edit]:
    """Yield changes with which the engines of a group fit, the nearest first."""
    group, pipeline = next(group for group in fit.groups if group.name == name), fit.pipeline
    spec = pipeline.groups[name]
    here = Room(spec.gpus_per_node, spec.ranks)
    anywhere = Room(max(spec.gpus_per_node, GPUS_OF_MACHINE), GPUS_OF_MACHINE * _MOST_MACHINES)

    def ladders(room: Room) -> list[Ladder]:
        engines = (
            PlannedEngine[EngineSpec](pipeline, fit.plan, tenant.name, fit.shape, group.gpu) for tenant in group.tenants
        )
        ladders = [
            ladder for engine in engines for ladder in backend_of(engine.spec).changes(engine, room) if ladder.rungs
        ]
        return sorted(ladders, key=lambda ladder: ladder.last_resort)

    def over(change: Edit) -> int | None:
        """Return the missing bytes with the change; None if a layout does not divide ranks, machines or layers."""
        try:
            wanted = changed(pipeline, change)
            if not _suits_machines(wanted):
                return None
            return group_fit(wanted, make_plan(wanted, graph), name, gpu, fit.shape).over
        except (ValueError, AssertionError):
            return None

    near, wide = ladders(here), ladders(anywhere)
    yield from (
        change for change in _together([ladder for ladder in near if not ladder.last_resort]) if over(change) == 0
    )
    yield from _in_a_row(Edit({}), near, over)
    for more in _more_gpus(pipeline, name):
        yield from _in_a_row(more, wide, over)


def changed(pipeline: Pipeline, change: Edit) -> Pipeline:
    """Return the pipeline with the change. Pydantic's ValueError for an invalid value."""
    tree = pipeline.model_dump(exclude_unset=True)
    for place, value in change.values.items():
        inner: Any = tree
        for key in place[:-1]:
            inner = inner.setdefault(key, {})
        inner[place[-1]] = value
    return Pipeline.model_validate(tree)


def _suits_machines(pipeline: Pipeline) -> bool:
    """Whether ranks that must share a machine do so; validation checks it too, but after the estimates."""
    return all(
        backend_of(engine).suits_machines(engine, group)
        for engine in pipeline.engines.values()
        if (group := pipeline.groups.get(engine.group or "")) is not None and group.nodes > 1
    )


def _in_a_row(first: Edit, ladders: list[Ladder], over: Callable[[Edit], int | None]) -> Iterator[Edit]:
    """Add the most helpful rung to `first`, and so on, until all engines fit; then drop unnecessary ones."""
    steps: list[tuple[int, Edit]] = []

    def with_all(chosen: list[tuple[int, Edit]]) -> Edit:
        return reduce(or_, (rung for _, rung in chosen), first)

    missing = over(first)
    while missing != 0 and len(steps) < _MOST_IN_A_ROW:
        tried = [
            (over(with_all([*steps, (i, rung)])), i, rung) for i, ladder in enumerate(ladders) for rung in ladder.rungs
        ]
        better = [
            (left, i, rung) for left, i, rung in tried if left is not None and (missing is None or left < missing)
        ]
        if not better:
            return
        # The first of the best, because ladders are in the order of their cost.
        missing, index, rung = min(better, key=lambda attempt: attempt[0])
        steps.append((index, rung))
    if missing == 0:
        yield with_all(_less(steps, ladders, lambda fewer: over(with_all(fewer)) == 0))


def _less(
    steps: list[tuple[int, Edit]], ladders: list[Ladder], fits: Callable[[list[tuple[int, Edit]]], bool]
) -> list[tuple[int, Edit]]:
    """Drop unnecessary steps, and lower the others to their cheapest rung, the last ladder first."""
    for step in sorted(steps, key=lambda step: -step[0]):
        at = steps.index(step)
        rungs = ladders[step[0]].rungs
        lower = rungs[: rungs.index(step[1])]
        replaced = ([*steps[:at], (step[0], rung), *steps[at + 1 :]] for rung in lower)
        steps = next(filter(fits, ([*steps[:at], *steps[at + 1 :]], *replaced)), steps)
    return steps


def _together(ladders: list[Ladder]) -> Iterator[Edit]:
    """Yield one change, then two, and so on, with at most one rung of a ladder, lower rungs first."""
    for count in range(1, _MOST_TOGETHER + 1):
        chosen = []
        for some in itertools.combinations(range(len(ladders)), count):
            for rungs in itertools.product(*(range(len(ladders[index].rungs)) for index in some)):
                # Lower rungs first, then the ladders in their order.
                chosen.append((sum(rungs), some, rungs))
        for _, some, rungs in sorted(chosen):
            yield reduce(or_, (ladders[index].rungs[rung] for index, rung in zip(some, rungs, strict=True)))


def _more_gpus(pipeline: Pipeline, name: str) -> list[Edit]:
    """Return more GPUs, doubled each time: on the group's machines first, then on more machines."""
    group = pipeline.groups[name]
    own: Place = ("groups", name, "gpus_per_node")
    per_node = sorted({*doubled(group.gpus_per_node, GPUS_OF_MACHINE), GPUS_OF_MACHINE})
    fuller = [Edit({own: count}) for count in per_node if count > group.gpus_per_node]
    more = (Edit({("groups", name, "nodes"): nodes}) for nodes in doubled(group.nodes, _MOST_MACHINES))
    return [*fuller, *(reduce(or_, fuller[-1:], count) for count in more)]
