"""Explains the steps of a run: the causes of their time, and keys that would shorten them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import RenderableType

from dagrl.config.schema import Pipeline
from dagrl.planner.cost.lengths import Assumed
from dagrl.reporting.measured_run import LEAST_STEPS, lengths_of_run, mean_of, usual_steps
from dagrl.reporting.run_data.run_reader import RunReader, config_of, open_run
from dagrl.reporting.run_data.sample_view import sample_file
from dagrl.reporting.why.changes import Straggling, changes, changes_by_size
from dagrl.reporting.why.counterfactuals import Advice, advice
from dagrl.reporting.why.critical_path import STRAGGLER, Part, critical_path
from dagrl.scheduler.plan import Plan
from dagrl.tables import render, table
from dagrl.tracking.run_notes import run_notes

_SHOWN_SHARE = 0.005
"""Parts of a path below this share of the step are summed up."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of steps' times."""

    steps: list[int]
    step_s: float
    """Mean seconds of the steps."""
    path: list[tuple[str, str, str, float]]
    """Node, executor, cause and seconds of a step, the longest first; together they are the step."""
    usual_step_s: float
    """Median seconds of the steps to which advice applies: steps without validation and checkpoint."""
    advice: list[Advice]
    why_no_advice: str
    straggler: Straggler | None
    """None if no step waits for its last responses."""
    notes: str = ""
    """Notes on these steps, for example that most responses were cut; usually empty."""


def explain(folder: Path, step: int | None = None) -> Explanation:
    """Explain a step, or the newest ones. ValueError if the run has no such step, or no pipeline; PipelineError."""
    run = open_run(folder)
    planned = run.pipeline()
    pipeline, graph, plan = planned.on_its_gpus, planned.graph, planned.plan
    usual = usual_steps(run, plan)
    finished = run.by_step
    # A run that has just started has only its first step.
    timed = [number for number in run.timed_steps if number in finished and number > 0]
    chosen = (usual or timed[-1:]) if step is None else [step]
    windows = {number: window for number in chosen if (window := run.commit_interval(number)) is not None}
    if not windows and step is None:
        raise ValueError(f"{folder} has not finished a step with a timeline yet")
    if not windows:
        known = f"steps {timed[0]} to {timed[-1]} are known" if timed else "no step is finished yet"
        raise ValueError(f"{folder} has no timeline of step {step}: {known}")
    paths = {number: critical_path(run.within(window), window, plan) for number, window in windows.items()}
    step_s = fmean(window.end - window.start for window in windows.values())
    summed = _summed(paths)
    intervals = [interval for number in usual if (interval := run.commit_interval(number)) is not None]
    usual_step_s = median([interval.end - interval.start for interval in intervals] or [step_s])
    advised, why_not = [], ""
    if len(usual) < LEAST_STEPS:
        why_not = "advice needs two steps beside the first"
    else:
        try:
            tried = [
                *changes(pipeline, graph, plan, _straggling(run, plan, summed)),
                *changes_by_size(pipeline, graph, _lengths(run, pipeline, windows)),
            ]
            actual = [activity for activity in run.spans if activity.step in set(usual)]
            advised = advice(planned, tried, actual, usual_step_s)
        except ValueError as error:
            why_not = str(error)
    return Explanation(
        sorted(windows), step_s, summed, usual_step_s, advised, why_not,
        straggler(folder, paths, finished),
        "; ".join(run_notes([finished.get(number, {}) for number in windows], config_of(folder)).values()),
    )  # fmt: skip


def as_text(folder: Path, explained: Explanation) -> str:
    steps = explained.steps
    which = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps up to {steps[-1]}, on average"
    parts: list[RenderableType] = [f"{folder}: {which}: {_seconds(explained.step_s)}", ""]
    rows = [
        [name, executor, cause, _seconds(seconds), f"{seconds / explained.step_s:.0%}"]
        for name, executor, cause, seconds in explained.path
        if seconds >= _SHOWN_SHARE * explained.step_s
    ]
    parts.append(table(rows, headings=["critical path", "on", "cause", "seconds", "of a step"], left=(0, 1, 2)))
    if explained.straggler is not None:
        parts.append(f"  {explained.straggler.sentence()}")
    if explained.notes:
        parts.append(f"  {explained.notes}")
    if steps == [1]:
        parts.append("  the first step of a run takes longer than others: kernels and connections are made in it")
    if explained.advice:
        changed = [["as it is", _seconds(explained.usual_step_s), "", "", ""]]
        for tip in explained.advice:
            saves = f"{tip.least:.0%} to {tip.most:.0%}"
            changed.append([tip.key, _seconds(tip.step_s), f"-{tip.gain:.0%}", saves, tip.what])
        headings = ["change", "a step", "saves", "range", ""]
        parts += [
            "",
            table(changed, headings=headings, left=(0, 4)),
            "  simulated with the run's own times, each change alone",
        ]
    else:
        parts += ["", f"  {explained.why_no_advice or 'no change that was tried would save a hundredth of a step'}"]
    return render(parts)


def as_values(explained: Explanation) -> dict[str, object]:
    path = [dict(zip(("node", "executor", "cause", "seconds"), part, strict=True)) for part in explained.path]
    return asdict(explained) | {"path": path}


def _summed(paths: dict[int, list[Part]]) -> list[tuple[str, str, str, float]]:
    sums: dict[tuple[str, str, str], float] = defaultdict(float)
    for part in (part for path in paths.values() for part in path):
        sums[part.name, part.executor, part.cause] += part.end - part.start
    return sorted(((*key, total / len(paths)) for key, total in sums.items()), key=lambda part: -part[-1])


def _straggling(run: RunReader, plan: Plan, path: list[tuple[str, str, str, float]]) -> dict[str, Straggling]:
    means, longest = run.of("response_tokens/mean"), run.of("response_tokens/max")
    thin = 1 - fmean(means) / fmean(longest) if means and longest and fmean(longest) else 0.0
    whole: dict[str, float] = defaultdict(float)
    tail: dict[str, float] = defaultdict(float)
    for name, _, cause, seconds in path:
        whole[name] += seconds
        tail[name] += seconds if cause == STRAGGLER else 0.0
    names = [task.name for task in plan.tasks if task.generates and whole[task.name]]
    return {name: Straggling(tail[name] / whole[name], thin) for name in names}


def _lengths(run: RunReader, pipeline: Pipeline, steps: dict[int, Any]) -> Assumed:
    mean = mean_of(run, "response_tokens/mean", steps)
    samplings = [
        sampling for name in pipeline.rollouts for sampling in pipeline.samplings(name, validated=False).values()
    ]
    limit = max((sampling.max_new_tokens for sampling in samplings), default=0)
    prompt = lengths_of_run(run, pipeline, steps).prompt_tokens
    return Assumed(prompt, mean if mean and mean <= limit else None)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.3f} s" if seconds < 10 else f"{seconds:,.1f} s"


_ALIKE = 0.8
"""Responses differ little in length if the mean is more than this share of the longest."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """The step that waited longest for its last responses."""

    step: int
    seconds: float
    """Seconds in which the last shard of the rollout ran alone."""
    longest: float | None
    """Tokens of the longest response; None if unknown."""
    mean: float | None
    """Tokens of the mean response."""
    samples: tuple[int, ...]
    """Ids of stored samples with that many tokens, if there are few."""

    def sentence(self) -> str:
        if self.longest is None or self.mean is None:
            return f"the rollout of step {self.step} waited {self.seconds:,.2f} s for its last responses"
        text = f"step {self.step}: the longest response has {self.longest:,.0f} tokens"
        if self.samples:
            text += f" (sample {', '.join(map(str, self.samples))})"
        text += f", the mean one {self.mean:,.0f}"
        if self.mean > _ALIKE * self.longest:
            text += ": lengths are alike, so that a tool, an environment or a server is late"
        return text


_MOST_NAMED = 3


def straggler(
    folder: Path, paths: Mapping[int, Sequence[Part]], metrics: Mapping[int, Mapping[str, float]]
) -> Straggler | None:
    """Find it from the steps' critical paths and metrics, and from stored samples."""
    waits = {
        step: sum(part.end - part.start for part in path if part.cause == STRAGGLER) for step, path in paths.items()
    }
    step = max(waits, key=waits.__getitem__, default=None)
    if step is None or not waits[step]:
        return None
    line = metrics.get(step, {})
    longest = line.get("response_tokens/max")
    samples = _stored(folder, step, longest) if longest else ()
    few = samples if len(samples) <= _MOST_NAMED else ()
    return Straggler(step, waits[step], longest, line.get("response_tokens/mean"), few)


def _stored(folder: Path, step: int, tokens: float) -> tuple[int, ...]:
    """Ids of the step's stored samples of that length; empty without a readable file."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        path = sample_file(folder, step)
        if path is None:
            return ()
        table = pq.read_table(path, columns=["sample_id", "response_tokens"])
    except (pa.ArrowInvalid, ValueError, OSError):
        return ()
    lengths = pc.list_value_length(table["response_tokens"]).to_pylist()
    ids = table["sample_id"].to_pylist()
    return tuple(number for number, length in zip(ids, lengths, strict=True) if length == tokens)
