"""Reads the times of a run for the plan of another one: `dagrl plan --from RUN`."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from dagrl.backends.families.registry import model_shape
from dagrl.backends.planning.gpus import DEFAULT_GPU
from dagrl.config.schema import Pipeline
from dagrl.planner.cost.calibration import RunTimes, calibrate, devices_of
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.planner.cost.estimate import estimate_step, steady_activities
from dagrl.planner.cost.lengths import Assumed
from dagrl.planner.simulation.costs import seconds_of_step
from dagrl.reporting.run_data.run_reader import RunReader, open_run
from dagrl.scheduler.plan import Plan
from dagrl.validation.summary import layout_in_words


def run_times(folder: Path, *, gpu: str | None = None) -> RunTimes:
    """Measure a run, and estimate the same steps by the cost model.

    `gpu` is the GPU of groups that name none. ValueError if there is no run, or too little of it; PipelineError if its
    pipeline.yaml cannot be read.
    """
    gpu = gpu or DEFAULT_GPU
    run = open_run(folder)
    pipeline, plan = run.pipeline().on_its_gpus, run.pipeline().plan
    steps = usual_steps(run, plan)
    if len(steps) < LEAST_STEPS:
        raise ValueError(f"{folder} has too few steps to learn from: {LEAST_STEPS} beside the first are needed")
    chosen = set(steps)
    measured = seconds_of_step(plan, [activity for activity in run.spans if activity.step in chosen])
    windows = [window for step in steps if (window := run.commit_interval(step)) is not None]
    step_s = median(window.end - window.start for window in windows)
    lengths = lengths_of_run(run, pipeline, chosen)
    costs = PipelineCosts(pipeline, plan, model_shape(pipeline.model), gpu, lengths)
    estimated = seconds_of_step(plan, steady_activities(plan, costs))
    calibration = calibrate(plan, estimated, measured)
    simulated_s = estimate_step(replace(costs, calibration=calibration)).step_s
    calibration = replace(calibration, driver_s=max(0.0, step_s - simulated_s))
    devices = devices_of(pipeline, plan, gpu)
    return RunTimes(
        str(folder), len(steps), steps[-1], step_s, estimated, measured, calibration, lengths, devices,
        _layout(pipeline, plan), pipeline,
    )  # fmt: skip


def lengths_of_run(run: RunReader, pipeline: Pipeline, steps: Container[int]) -> Assumed:
    """Mean tokens of the prompts and responses that `steps` train on; None if unknown.

    They are unknown if several rollouts share the metrics, or if a mean exceeds its limit, for example because a
    resumed run has lowered it: the cost model refuses that.
    """
    rollouts = list(pipeline.rollouts.values())
    if len(rollouts) != 1 or pipeline.is_offline:
        return Assumed()
    samplings = pipeline.samplings(pipeline.leading_rollout, validated=False).values()
    limits = {
        "prompt_tokens": rollouts[0].max_prompt_tokens or pipeline.data.max_prompt_tokens,
        "response_tokens": max(sampling.max_new_tokens for sampling in samplings),
    }
    means = {name: mean_of(run, f"{name}/mean", steps) for name in limits}
    return Assumed(**{name: mean if mean and mean <= limits[name] else None for name, mean in means.items()})


def mean_of(run: RunReader, name: str, steps: Container[int]) -> float | None:
    """Mean of a metric over the `steps` that have it."""
    values = [line[name] for line in run.steps if line["step"] in steps and line.get(name)]
    return fmean(values) if values else None


def _layout(pipeline: Pipeline, plan: Plan) -> str:
    groups = ((name, executor.group) for name, executor in plan.executors.items())
    return "; ".join(f"{name} on {group}, {layout_in_words(pipeline, name)}" for name, group in groups if group)


LEAST_STEPS = 2
"""Fewest steps that determine a typical one."""
_MOST_STEPS = 200
"""Number of the newest steps that are considered."""


def usual_steps(run: RunReader, plan: Plan) -> list[int]:
    """The newest steps, without the first after a start, and without steps with validation or save if enough remain."""
    after_pause = {step + 1 for step, _ in run.pauses()}
    finished = run.by_step
    steps = [step for step in run.timed_steps if step > 1 and step in finished and step not in after_pause]
    plain = [step for step in steps if not plan.validates(step) and not plan.saves(step)]
    return (plain if len(plain) >= LEAST_STEPS else steps)[-_MOST_STEPS:]
