"""The actual critical path of a step: the activities that determined its length."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from dagrl.scheduler.intervals import Activity, Interval
from dagrl.scheduler.plan import HOST, Plan, Rows

_TOLERANCE_S = 2e-3
"""Clocks of workers and driver differ by less than this."""
_AT_ONCE_S = 0.02
_STRAGGLES = 2.0
"""A last shard straggles if the gap before its end exceeds this multiple of the median gap between shards."""
_SHORTEST_S = 1e-4
_MOVES = {
    "sync": "weights travel",
    "sleep": "memory turns",
    "wake": "memory turns",
    "save": "checkpoint",
    "write": "checkpoint",
    "restart": "restart",
}
STRAGGLER = "waits for the last responses"
GENERATION, COMPUTATION, ON_HOST, DRIVER = "generation", "computation", "host", "no worker runs"
VALIDATION = "validation"


class Part(NamedTuple):
    """A part of the path, in seconds since the epoch."""

    name: str
    """The activity; ``driver`` if no worker runs."""
    executor: str
    cause: str
    start: float
    end: float


def critical_path(spans: Sequence[Activity], window: Interval, plan: Plan) -> list[Part]:
    """Walk back from the end of a step's window: before each activity comes the last one that it waited for.

    `spans` are all activities that overlap with the window. The parts cover the window without gaps, in order.
    """
    needs = waits_for(plan)
    generating = {task.name for task in plan.tasks if task.generates}
    validating = {task.name for task in plan.tasks if task.rows is Rows.VALIDATION}
    left = [span for span in spans if span.end - span.start > _SHORTEST_S]
    now, current = window.end, None
    path: list[Part] = []
    while now > window.start + _SHORTEST_S:
        before = [span for span in left if span.start < now - _SHORTEST_S and _ended(span, now, current)]
        if current is not None:
            known = [span for span in before if _precedes(span, current, needs)]
            before = known + _of_host(before, known, current) or before
        if not before:
            path.append(Part("driver", "", DRIVER, window.start, now))
            break
        last = max(before, key=lambda span: (span.end, span.end - span.start))
        if last.end > now + _TOLERANCE_S:
            # The rollout was called before its weights arrived.
            while path and path[-1].end <= last.end:
                path.pop()
            if path:
                path[-1] = path[-1]._replace(start=max(path[-1].start, last.end))
            now = last.end
        if last.end < now - _SHORTEST_S:
            path.append(Part("driver", "", DRIVER, max(last.end, window.start), now))
        start = _start_of_rollout(last, left) if last.name in generating else last.start
        begin, end = max(start, window.start), min(last.end, now)
        if end > begin:
            path += reversed(_parts(last, begin, end, left, generating))
        left.remove(last)
        now, current = begin, last
    return [
        part._replace(cause=VALIDATION) if part.name in validating else part
        for part in reversed(path)
        if part.end > part.start
    ]


def waits_for(plan: Plan) -> dict[str, frozenset[str]]:
    """Task -> all tasks that must be done before it; a sync waits for updates."""
    import networkx

    graph: networkx.DiGraph[str] = networkx.DiGraph()
    graph.add_nodes_from(task.name for task in plan.tasks)
    graph.add_edges_from((before, task.name) for task in plan.tasks for before in plan.waits_for(task))
    needs = {name: frozenset(networkx.ancestors(graph, name)) for name in graph}
    needs["sync"] = frozenset(task.name for task in plan.tasks if task.trains)
    return needs


def _ended(span: Activity, now: float, later: Activity | None) -> bool:
    """Whether `span` had ended when `later` began, `now`. A move of the same workers may overlap with `later`."""
    moved = later is not None and span.name in _MOVES and span.executor == later.executor
    return span.end <= (later.end if moved and later is not None else now + _TOLERANCE_S)


def _precedes(span: Activity, later: Activity, needs: Mapping[str, frozenset[str]]) -> bool:
    """Whether `later` may have waited for `span`: its inputs, or the same workers or GPUs."""
    same = span.executor == later.executor
    if same and span.group == HOST:
        # Any of the host's processes takes a task; a free process causes no wait.
        same = later.start - span.end < _AT_ONCE_S
    moved = span.group == later.group != HOST and span.name in _MOVES
    return same or moved or span.name in needs.get(later.name, ())


def _of_host(before: Sequence[Activity], known: Sequence[Activity], later: Activity) -> list[Activity]:
    """Host activities that ended after the inputs of the host task `later` were ready: it waited for a process."""
    ready = max((span.end for span in known), default=later.start)
    return [span for span in before if later.group == span.group == HOST and span.end > ready + _AT_ONCE_S]


def _start_of_rollout(span: Activity, spans: Sequence[Activity]) -> float:
    """Start of the rollout that runs without a pause until `span`, one of its shards.

    Servers take requests of later shards as they finish earlier ones.
    """
    start = span.start
    shards = [shard for shard in spans if (shard.name, shard.step) == (span.name, span.step)]
    for shard in sorted(shards, key=lambda shard: -shard.start):
        if shard.start < start <= shard.end + _TOLERANCE_S:
            start = shard.start
    return start


def _parts(
    span: Activity, begin: float, end: float, spans: Sequence[Activity], generating: Container[str]
) -> list[Part]:
    """An activity as parts of the path: the time in which only the last shard of a rollout ran is a separate part."""
    executor = span.executor
    if span.name not in generating:
        return [Part(span.name, executor, _cause(span), begin, end)]
    alone = _alone_from(span, spans)
    if alone is None or not begin < alone < end:
        return [Part(span.name, executor, GENERATION, begin, end)]
    return [Part(span.name, executor, GENERATION, begin, alone), Part(span.name, executor, STRAGGLER, alone, end)]


def _alone_from(span: Activity, spans: Sequence[Activity]) -> float | None:
    """Interval in which the last shard of a rollout ran alone; None if it does not straggle."""
    shards = [shard for shard in spans if (shard.name, shard.step) == (span.name, span.step)]
    ends = sorted(shard.end for shard in shards)
    if len(ends) < 2 or ends[-1] > span.end:
        return None
    gaps = [later - before for before, later in pairwise([min(shard.start for shard in shards), *ends])]
    return ends[-2] if gaps[-1] > _STRAGGLES * median(gaps) else None


def _cause(span: Activity) -> str:
    return _MOVES.get(span.name) or (ON_HOST if span.group == HOST else COMPUTATION)
