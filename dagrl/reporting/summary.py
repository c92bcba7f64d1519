"""The summary of a run, finished or not, as text and as values, and the text that ends a run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median

from rich.console import RenderableType

from dagrl.config.errors import counted
from dagrl.orchestrator.outcome import RunOutcome
from dagrl.reporting.run_data.run_reader import RunReader, config_of, read_run
from dagrl.tables import table
from dagrl.tracking.console import OF_A_SET, same_of_others
from dagrl.tracking.metrics_file import accounts
from dagrl.tracking.run_file import best_checkpoint
from dagrl.tracking.run_notes import run_notes

_MOST_IN_A_LINE = 4
_MOST_ALARMS = 10
"""The newest alarms that a summary shows. The page has all."""
_COUNTED = {
    "staleness/masked": "samples masked as too old",
    "data/dropped_prompts": "prompts dropped as too long, they or their responses, each once",
    "filter/filled_prompts": "prompts that steps were filled up with, though they did not pass the filter",
}

_Best = Callable[[list[float]], float] | None
_PROGRESS: tuple[tuple[str, _Best], ...] = (
    ("reward/mean", max),
    ("val/reward/mean", max),
    ("loss/dpo", min),
    ("val/loss/dpo", min),
    ("dpo/accuracy", max),
    ("val/dpo/accuracy", max),
    ("loss/sft", min),
    ("val/loss/sft", min),
    ("distillation/loss", min),
    ("distillation/kl", min),
    ("response_tokens/mean", None),
    ("filter/kept_fraction", None),
)
"""Metrics that show a run's result, and the direction of improvement."""
_OF_SOURCES: tuple[tuple[str, _Best], ...] = (
    ("/reward/mean", max),
    ("/pass_rate", max),
    ("/kept_fraction", None),
    ("/entropy", None),
)
"""Endings of metrics of a source that are shown."""
_STALENESS = ("staleness/mean", "staleness/max")
"""Shown if any samples were older than the weights."""


def summary(run: RunReader, idle: Mapping[str, float], steps: int | None = None) -> list[RenderableType]:
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
    if equations := account_equations(run):
        parts += ["", *(f"  {text}" for text in equations)]
    if idle:
        shares = ([name, f"{share:.0%}"] for name, share in sorted(idle.items()))
        parts += ["", table(shares, headings=["group", "idle"])]
    return [*parts, *_troubles(run)]


def summary_values(run: RunReader, steps: int | None = None) -> dict[str, object]:
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
        "alarms": [
            {"step": alarm.step, "condition": alarm.condition.text, "value": alarm.value, "stops": alarm.stops}
            for alarm in run.alarms()
        ],
        "account": [asdict(account) for account in accounts(run.steps)],
    }


def main_metrics(run: RunReader) -> list[RenderableType]:
    """A table of the metrics that show a run's result; without training, only scores."""
    if any(line["step"] > 0 for line in run.steps):
        return [table(_progress_rows(run), headings=["", "first", "last", "best"])]
    lines = scores(run, 0)
    return ["  validation of the start weights", *(f"  {text}" for text in lines)] if lines else []


def account_equations(run: RunReader) -> list[str]:
    """The ends of the samples and tokens of each rollout and source: ``samples: 64 generated = 48 trained (75%)
    + 16 unused (25%)``.
    """
    lines = []
    for account in accounts(run.steps):
        for unit, counts in (("samples", account.samples), ("tokens", account.tokens)):
            whole = counts["generated"]
            ends = [
                f"{count:,} {end} ({count / whole:.0%})"
                for end, count in counts.items()
                if end != "generated" and count
            ]
            title = f"{unit} of {account.title}" if account.title else unit
            lines.append(f"{title}: {whole:,} generated = {' + '.join(ends) or 0}")
    return lines


def in_a_line(run: RunReader) -> str:
    """The first and last rewards of a run, or losses without rewards. Empty without either."""
    texts = [f"{name} {first} -> {last} (best {best})" for name, first, last, best in _progress_rows(run) if best]
    return ", ".join(texts[:_MOST_IN_A_LINE])


def scores(run: RunReader, step: int) -> list[str]:
    metrics = run.by_step.get(step, {})
    names = [name for name in metrics if name.startswith("val/") and not name.startswith("val/data/")]
    width = max(map(len, names), default=0)
    return [f"{name.ljust(width)}  {_number(metrics[name])}" for name in names]


def _progress_rows(run: RunReader) -> list[list[str]]:
    return [
        [name, _number(values[0]), _number(values[-1]), _number(best(values)) if best else ""]
        for name, best, values in _progress(run)
    ]


def _progress(run: RunReader) -> list[tuple[str, _Best, list[float]]]:
    known = dict.fromkeys(name for line in run.steps for name in line)
    sets: list[tuple[str, _Best]] = [(name, max) for name in known if OF_A_SET.fullmatch(name)]
    sets += [
        (name, best)
        for name in known
        for kind, best in _OF_SOURCES
        if name.startswith("train/") and name.endswith(kind)
    ]
    shown: list[tuple[str, _Best]] = []
    for name, best in _PROGRESS:
        shown += [(name, best), *((other, best) for other, _ in same_of_others(name, known))]
    if any(run.of("staleness/max")):
        shown += [(name, None) for name in _STALENESS]
    return [(name, best, values) for name, best in (*shown, *sets) if (values := run.of(name))]


def _times(run: RunReader) -> list[list[str]]:
    step_s = run.in_training("time/step_s")
    rows = []
    if step_s:
        rows.append(["step_s", *_three(step_s), ""])
    names = {name for line in run.steps for name in line if name.startswith("time/")} - {"time/step_s"}
    nodes = [(name, values) for name in names if (values := run.in_training(name))]
    for name, values in sorted(nodes, key=lambda node: -sum(node[1])):
        share = f"{sum(values) / sum(step_s):.0%}" if step_s and sum(step_s) else ""
        rows.append([f"  {name.removeprefix('time/')}", *_three(values), share])
    for name in ("throughput/tokens_per_s", "throughput/tokens_per_s_per_gpu"):
        if values := run.in_training(name):
            rows.append([name.removeprefix("throughput/"), *_three(values), ""])
    return rows


def _troubles(run: RunReader) -> list[str]:
    lines = []
    if restarts := _restarts(run):
        lines.append(f"restarts after losses: {restarts}")
    for name, what in _COUNTED.items():
        if total := sum(run.of(name)):
            lines.append(f"{what}: {total:.0f}")
    lines += [f"step {alarm.step}: {alarm}" for alarm in run.alarms()][-_MOST_ALARMS:]
    lines += run_notes(run.steps, config_of(run.folder)).values()
    return ["", *(f"  {line}" for line in lines)] if lines else []


def _restarts(run: RunReader) -> int:
    # Counted from 0 by each `dagrl run`, and reported by every step after a restart.
    counts = run.of("run/restarts")
    return round(sum(max(0.0, later - before) for before, later in zip([0.0, *counts], counts, strict=False)))


def _three(values: Sequence[float]) -> list[str]:
    return [_number(fmean(values)), _number(median(values)), _number(max(values))]


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"


_CONTENTS = {
    "metrics.jsonl": "metrics, one line a step",
    "samples": "responses of the policy, as parquet",
    "timeline.json": "timeline: open it in ui.perfetto.dev",
    "profile": "traces of the profiled steps, by step",
    "tensorboard": "tensorboard --logdir",
    "checkpoints": "where `dagrl run` goes on",
}


def closing_text(outcome: RunOutcome, folder: Path) -> str:
    took = "" if outcome.seconds is None else f" in {in_words(outcome.seconds)}"
    lines = [f"finished step {outcome.step}{took}"]
    if outcome.only_validated:
        weights = f"the checkpoint of step {outcome.step}" if outcome.step else "the start weights"
        lines = [f"validated {weights}{took}"]
    elif outcome.stopped:
        why = ", as run.stop_after says" if outcome.out_of_time else ", by an alarm" if outcome.alarm else ""
        lines = [f"stopped after step {outcome.step}{took}{why}; `dagrl run` with the same folder goes on"]
    elif outcome.before:
        lines = [
            f"finished step {outcome.step} before; nothing is left to do, a larger run.steps (or run.epochs) goes on"
        ]
        if outcome.changed:
            lines.append(f"  without effect, and not noted in the folder: {outcome.changed}")
    if outcome.alarm:
        lines.append(f"  {outcome.alarm}")
    with suppress(ValueError):  # the metrics were removed
        run = read_run(folder)
        lines += [
            f"  {text}" for text in (scores(run, outcome.step) if outcome.only_validated else [in_a_line(run)]) if text
        ]
    for name, what in _CONTENTS.items():
        if (folder / name).exists():
            lines.append(f"  {folder / name}  {what}")
    return "\n".join([*lines, "next", *(f"  {command}" for command in _next_commands(outcome, folder))])


def _next_commands(outcome: RunOutcome, folder: Path) -> list[str]:
    run, name = shlex.quote(str(folder)), folder.resolve().name
    several = len(outcome.policies) > 1
    # The validation before the first step leaves no checkpoint.
    policies = outcome.policies if outcome.step and not outcome.only_validated else ()
    exports = [
        f"dagrl export {run} -o {shlex.quote(f'{name}-{policy}-hf')} --engine {policy}"
        if several
        else f"dagrl export {run} -o {shlex.quote(f'{name}-hf')}"
        for policy in policies
    ]
    return [f"dagrl report {run}", *exports]


def in_words(seconds: float) -> str:
    """A duration: ``36 s``, ``12 min``, ``3 h 05 min``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
