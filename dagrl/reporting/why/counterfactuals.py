"""Steps under changes: the scheduler, simulated with measured times."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from dagrl.planner.simulation.costs import MeasuredCosts, measured_costs
from dagrl.planner.simulation.simulate import simulate
from dagrl.reporting.run_data.run_reader import RunPipeline, pipeline_of_run
from dagrl.reporting.why.changes import Change
from dagrl.scheduler.intervals import Activity
from dagrl.scheduler.plan import Plan

_STEPS, _WARM_UP = 10, 3
"""Number of simulated steps, in addition to the staleness, and of first steps that do not count."""
_RESAMPLES = 8
_LEAST_GAIN = 0.01
"""A smaller gain is no advice."""

_IF_CORES = ", if cores are free"


@dataclass(frozen=True, slots=True)
class Advice:
    """A change that would make steps shorter."""

    key: str
    """The override, or the section to change."""
    what: str
    step_s: float
    """Seconds of a step with it."""
    gain: float
    """Expected share of the step that it saves, then lower and upper bound, from the run's steps and unknown rates."""
    least: float
    most: float


def advice(
    run: RunPipeline, changes: Iterable[Change], activities: Sequence[Activity], measured_s: float
) -> list[Advice]:
    """The changes that help, the best first. `measured_s`: a step of the run, in seconds.

    Each is simulated with the median of the run's steps, and with resamples of the steps for its uncertainty. A
    simulated gain is subtracted from the measured step, which includes the driver's time.
    """
    samples = _resampled(activities)
    before = [step_seconds(run.plan, measured_costs(run.plan, sample)) for sample in (activities, *samples)]
    tips = []
    for change in changes:
        try:
            changed = pipeline_of_run(run.folder, change.overrides).plan if change.overrides else run.plan
        except ValueError:
            continue
        gains = []
        for sample, base in zip((activities, *samples), before, strict=True):
            costs = measured_costs(changed, sample)
            gains.append([base - step_seconds(changed, _scaled(costs, change, which)) for which in _WHICH])
        expected = gains[0][0] / measured_s
        every = [gain / measured_s for some in gains for gain in some]
        if expected >= _LEAST_GAIN:
            key = " ".join(change.overrides) or change.hint
            step_s = measured_s * (1 - expected)
            least = min(every)
            if change.needs_cores:
                least = min(least, 0.0)
            what = f"{change.what}{_IF_CORES if change.needs_cores else ''}"
            tips.append(Advice(key, what, step_s, expected, least, max(every)))
    return sorted(tips, key=lambda tip: -tip.gain)


def step_seconds(plan: Plan, costs: MeasuredCosts) -> float:
    """The mean of steps without validation and checkpoint, once the first ones are over."""
    steps = _STEPS + plan.max_staleness
    plain = replace(plan, steps=steps + 1, save_every=None, validate_every=None, validate_first=False)
    seconds = simulate(plain, costs, steps).step_seconds
    return fmean(seconds[step] for step in range(_WARM_UP + plan.max_staleness, steps + 1))


_WHICH = ("expected", "best", "worst")


def _scaled(costs: MeasuredCosts, change: Change, which: str) -> MeasuredCosts:
    factors: Mapping[str, float] = {scale.task: getattr(scale, which) for scale in change.scales}
    shard = {task: seconds * factors.get(task, 1.0) for task, seconds in costs.runs.shard.items()}
    return replace(costs, runs=replace(costs.runs, shard=shard))


def _resampled(activities: Iterable[Activity]) -> list[list[Activity]]:
    """Resamples of the steps with replacement, the same in each call."""
    by_step: dict[int, list[Activity]] = defaultdict(list)
    for activity in activities:
        by_step[activity.step].append(activity)
    steps, draw = sorted(by_step), random.Random(0)
    return [
        [
            activity._replace(step=place)
            for place, step in enumerate(draw.choices(steps, k=len(steps)), start=1)
            for activity in by_step[step]
        ]
        for _ in range(_RESAMPLES)
    ]
