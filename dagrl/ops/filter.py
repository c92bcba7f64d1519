"""``filter``: selects the groups of a round for training. Writes no column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dagrl.config.schema import FilterNode
from dagrl.data.batch import Batch, view_of
from dagrl.data.stats import Stat
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.trajectories import first_rows, group_outcomes, own_rows
from dagrl.plugins.calls import call_or_stop
from dagrl.plugins.custom import load_function, located
from dagrl.plugins.declarations import rule_columns


def filter(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Yield the rows of the groups that pass. Raises ValueError unless the metric has one number per sample.

    Samples with a failed agent do not count, and a group with only such samples does not pass.
    """
    node = context.declared(FilterNode)
    (part,) = parts
    batch = part.batch
    passes = _rule(node, context) if node.fn else _bounds(node, batch)
    groups, counts = np.unique(batch["group_id"].values, return_counts=True)
    places = np.split(np.argsort(batch["group_id"].values, kind="stable"), np.cumsum(counts)[:-1])
    members = [batch.take(mine) for mine in places]
    samples = [own_rows(first_rows(mine, context)) for mine in members]
    passing = [len(mine) > 0 and passes(mine) for mine in samples]
    passed = groups[passing]
    # These metrics cover all samples. `samples` reports the ones that the step trains on, which no longer measure the
    # policy.
    counted = own_rows(first_rows(batch, context))
    stats = {} if node.fn else {f"filter/{node.metric}": Stat.of(counted[node.metric].values)}
    stats |= _kept_of_sources(members, passing, context)
    outcomes = group_outcomes(counted, context.pipeline.data) if "reward" in counted else None
    yield Output((), batch.rows[np.isin(batch["group_id"].values, passed)], stats=stats, outcomes=outcomes)


def _kept_of_sources(groups: Sequence[Batch], passed: Sequence[bool], context: Context) -> dict[str, Stat]:
    prefixes = context.pipeline.data.train_prefixes
    kept: dict[str, list[bool]] = {}
    for group, passes in zip(groups, passed, strict=True) if prefixes else ():
        kept.setdefault(group["data_set"].strings()[0], []).append(passes)
    return {f"{prefixes[name]}kept_fraction": Stat.of(passed) for name, passed in kept.items() if name in prefixes}


def passes_bounds(values: np.ndarray, *, lower: float | None, upper: float | None, min_std: float | None) -> bool:
    """Whether a group's mean is between `lower` and `upper`, and its standard deviation above `min_std`. None: no
    bound.
    """
    values = values.astype(np.float64)
    mean = values.mean()
    # Rounding can give equal numbers a standard deviation above 0.
    std = values.std() if values.min() < values.max() else 0.0
    return bool(
        (lower is None or mean > lower) and (upper is None or mean < upper) and (min_std is None or std > min_std)
    )


def _bounds(node: FilterNode, batch: Batch) -> Callable[[Batch], bool]:
    if batch[node.metric].offsets is not None:
        raise ValueError(
            f"a filter needs a metric with one number per sample, and `{node.metric}` has several; name another "
            "metric, or decide with your own function (fn)"
        )

    def passes(group: Batch) -> bool:
        own = node.bounds_of(group["data_set"].strings()[0]) if node.by_source else node
        return passes_bounds(group[node.metric].values, lower=own.lower, upper=own.upper, min_std=own.least_std)

    return passes


def _rule(node: FilterNode, context: Context) -> Callable[[Batch], bool]:
    assert node.fn is not None
    place, rule = node.fn, load_function(node.fn, context.resources.folder)
    columns = rule_columns(rule, node.args)

    def passes(group: Batch) -> bool:
        seen = view_of(group)
        answer = call_or_stop(place, rule, {name: seen[name] for name in columns} | node.args)
        if not isinstance(answer, bool | np.bool_):
            raise ValueError(
                f"{located(rule, place)} returned {answer!r:.100}; return True or False: whether the group passes"
            )
        return bool(answer)

    return passes
