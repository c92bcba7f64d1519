"""Summarises a run, finished or not, from its folder: `metrics.jsonl` and `timeline.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import yaml
from rich.console import RenderableType

from dagrl.config.errors import counted
from dagrl.tables import table
from dagrl.tracking.other_policies import same_of_others
from dagrl.tracking.run_file import best_checkpoint, run_text
from dagrl.tracking.run_notes import run_notes
from dagrl.tracking.timeline import parse_events

_LARGEST = 1 << 1000
_OWN_TIMES = ("time/step_s",)
_OF_A_SET = re.compile(r"val/.+/mean@\d+")
"""Metrics of a single validation set or data source."""
_MOST_IN_A_LINE = 4
"""Number of metrics in a line."""
_COUNTED = {
    "staleness/masked": "samples masked as too old",
    "staleness/dropped": "samples dropped as too old",
    "data/dropped_prompts": "prompts dropped as too long, they or their responses, once an epoch",
    "filter/filled_prompts": "prompts that steps were filled up with, though they did not pass the filter",
}


_PROGRESS: tuple[tuple[str, Callable[[list[float]], float] | None], ...] = (
    ("reward/mean", max),
    ("val/reward/mean", max),
    ("loss/dpo", min),
    ("val/loss/dpo", min),
    ("dpo/accuracy", max),
    ("val/dpo/accuracy", max),
    ("loss/sft", min),
    ("val/loss/sft", min),
    ("response_tokens/mean", None),
    ("filter/kept_fraction", None),
)
"""Metrics that show a run's result, and which value is best."""
_STALENESS = ("staleness/mean", "staleness/max")
"""Shown if any samples were older than the weights."""


class TimelineSpan(NamedTuple):
    """An activity, from `start` to `end` in seconds since the epoch."""

    name: str
    category: str
    start: float
    end: float
    step: int
    shard: int | None
    group: str
    worker: str


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run folder."""

    folder: Path
    steps: Sequence[dict[str, Any]]
    """Numeric metrics of each step in order, including ``step``."""
    spans: Sequence[TimelineSpan]
    torn: int
    """Number of unreadable lines in metrics.jsonl."""

    @property
    def last_step(self) -> int:
        """The newest finished step; 0 without any."""
        return max((line["step"] for line in self.steps), default=0)

    def of(self, name: str) -> list[float]:
        """Values of a metric in all steps that have it."""
        return [line[name] for line in self.steps if isinstance(line.get(name), int | float)]

    def in_training(self, name: str) -> list[float]:
        """The same without the validation before the first step, which is step 0."""
        return [line[name] for line in self.steps if line["step"] > 0 and isinstance(line.get(name), int | float)]


def read_run(folder: Path) -> RunRecord:
    """Read a run folder. Raises ValueError if it is not one or cannot be read."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the run folder, by default runs/NAME")
    text = run_text(folder, "metrics.jsonl")
    if text is None:
        has_begun = (folder / "pipeline.yaml").is_file()
        why = "its run has not finished a step" if has_begun else "no run has written there"
        raise ValueError(f"{folder} holds no metrics.jsonl: {why}")
    lines = [parse_step(line) for line in text.splitlines()]
    steps = [line for line in lines if line is not None]
    events = parse_events((run_text(folder, "timeline.json") or "").splitlines())
    torn = len(lines) - len(steps)
    spans = spans_of(events, folder / "timeline.json")
    return RunRecord(folder, sorted(steps, key=lambda step: step["step"]), spans, torn)


def parse_step(line: str) -> dict[str, Any] | None:
    """The numbers of a line of metrics.jsonl, including ``step``; None if it is torn."""
    try:
        step = json.loads(line)
        number = int(step["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    return {name: value for name, value in step.items() if _is_number(value)} | {"step": number}


def _is_number(value: Any) -> bool:
    """Whether it is one that arithmetic in floating point takes. NaN and infinity are."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < _LARGEST)


def summary(run: RunRecord, idle: Mapping[str, float], steps: int | None = None) -> list[RenderableType]:
    """Text and tables, a screenful. `idle`: share of the time for each group; `steps`: the number the run asked for."""
    taken = f"{run.last_step} of {counted(steps, 'step')}" if steps else counted(run.last_step, "step")
    parts: list[RenderableType] = [f"{run.folder}: {taken}"]
    if run.torn:
        what = "a line is" if run.torn == 1 else f"{run.torn} lines are"
        parts.append(f"  {what} torn in metrics.jsonl and left out")
    if not any(line["step"] > 0 for line in run.steps):
        return [*parts, *(main_metrics(run) or ["  no step has been finished yet"]), *_troubles(run)]
    parts += ["", *main_metrics(run)]
    if best := best_checkpoint(run.folder):
        parts.append(f"  best checkpoint: {best}; dagrl export {run.folder} --best -o DIR")
    parts += ["", table(_times(run), headings=["", "mean", "median", "most", "of a step"])]
    if idle:
        shares = ([name, f"{share:.0%}"] for name, share in sorted(idle.items()))
        parts += ["", table(shares, headings=["group", "idle"])]
    return [*parts, *_troubles(run)]


def summary_values(run: RunRecord, steps: int | None = None) -> dict[str, Any]:
    """The summary as plain values; `steps`: the number the run asked for."""
    return {
        "run": str(run.folder),
        "step": run.last_step,
        "steps": steps,
        "torn_lines": run.torn,
        "best_checkpoint": best_checkpoint(run.folder),
        "metrics": {
            name: {"first": values[0], "last": values[-1], "best": best_of(values) if best_of else None}
            for name, best_of, values in _progress(run)
        },
        "seconds": {
            name.removeprefix("time/"): {"mean": fmean(values), "median": median(values), "max": max(values)}
            for name in dict.fromkeys(name for line in run.steps for name in line if name.startswith("time/"))
            if (values := run.in_training(name))
        },
        "restarts": _restarts(run),
    }


def main_metrics(run: RunRecord) -> list[RenderableType]:
    """A table of the metrics that show a run's result; only the scores of a run that has trained nothing."""
    if any(line["step"] > 0 for line in run.steps):
        return [table(_progress_rows(run), headings=["", "first", "last", "best"])]
    told = scores(run, 0)
    return ["  validation of the start weights", *(f"  {each}" for each in told)] if told else []


def in_a_line(run: RunRecord) -> str:
    """The first and last rewards of a run, or losses where it has no rewards. Empty without either."""
    told = [f"{name} {first} -> {last} (best {best})" for name, first, last, best in _progress_rows(run) if best]
    return ", ".join(told[:_MOST_IN_A_LINE])


def scores(run: RunRecord, step: int) -> list[str]:
    """What the validation of a step has measured, a line for each metric."""
    found = next((line for line in run.steps if line["step"] == step), {})
    names = [name for name in found if name.startswith("val/") and not name.startswith("val/data/")]
    width = max(map(len, names), default=0)
    return [f"{name.ljust(width)}  {_number(found[name])}" for name in names]


_Best = Callable[[list[float]], float] | None


def _progress_rows(run: RunRecord) -> list[list[str]]:
    return [
        [name, _number(values[0]), _number(values[-1]), _number(best(values)) if best else ""]
        for name, best, values in _progress(run)
    ]


def _progress(run: RunRecord) -> list[tuple[str, _Best, list[float]]]:
    """Metrics that show a run's result: name, which value is best, values."""
    known = dict.fromkeys(name for line in run.steps for name in line)
    sets = [(name, max) for name in known if _OF_A_SET.fullmatch(name)]
    shown: list[tuple[str, _Best]] = []
    for name, best in _PROGRESS:
        shown += [(name, best), *((other, best) for other, _ in same_of_others(name, known))]
    if any(run.of("staleness/max")):
        shown += [(name, None) for name in _STALENESS]
    return [(name, best, values) for name, best in (*shown, *sets) if (values := run.of(name))]


def _times(run: RunRecord) -> list[list[str]]:
    """Seconds of steps and nodes, and tokens per second."""
    step_s = run.in_training("time/step_s")
    rows = []
    if step_s:
        rows.append(["step_s", *_three(step_s), ""])
    names = {name for line in run.steps for name in line if name.startswith("time/")} - {*_OWN_TIMES}
    nodes = [(name, values) for name in names if (values := run.in_training(name))]
    for name, values in sorted(nodes, key=lambda node: -sum(node[1])):
        share = f"{sum(values) / sum(step_s):.0%}" if step_s and sum(step_s) else ""
        rows.append([f"  {name.removeprefix('time/')}", *_three(values), share])
    for name in ("throughput/tokens_per_s", "throughput/tokens_per_s_per_gpu"):
        if values := run.in_training(name):
            rows.append([name.removeprefix("throughput/"), *_three(values), ""])
    return rows


def _troubles(run: RunRecord) -> list[str]:
    """Restarts, dropped samples and the like."""
    lines = []
    if restarts := _restarts(run):
        lines.append(f"restarts after losses: {restarts}")
    for name, what in _COUNTED.items():
        if total := sum(run.of(name)):
            lines.append(f"{what}: {total:.0f}")
    lines += run_notes(run.steps, config_of(run.folder)).values()
    return ["", *(f"  {line}" for line in lines)] if lines else []


def config_of(folder: Path) -> dict[str, Any]:
    """The pipeline of a run, as it is written; empty if it cannot be read."""
    try:
        tree = yaml.safe_load(run_text(folder, "pipeline.yaml") or "")
    except yaml.YAMLError:
        return {}
    return tree if isinstance(tree, dict) else {}


def _restarts(run: RunRecord) -> int:
    # Counted from 0 by each `dagrl run`, and reported by every step after a restart.
    counts = run.of("run/restarts")
    return round(sum(max(0.0, later - before) for before, later in zip([0.0, *counts], counts, strict=False)))


def _three(values: Sequence[float]) -> list[str]:
    return [_number(fmean(values)), _number(median(values)), _number(max(values))]


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"


def spans_of(events: Iterable[dict[str, Any]], path: Path) -> list[TimelineSpan]:
    """The activities of a timeline's events. ValueError, which names `path`, if they are of another program."""
    try:
        return [
            TimelineSpan(
                str(event["name"]),
                str(event["cat"]),
                event["ts"] / 1e6,
                (event["ts"] + event["dur"]) / 1e6,
                int(event["args"]["step"]),
                event["args"]["shard"],
                str(event["args"]["group"]),
                str(event["args"]["worker"]),
            )
            for event in events
        ]
    except KeyError as error:
        raise ValueError(f"{path} is not a run's timeline: an event lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a run's timeline: an event has an unexpected value ({error})") from error
