"""The text that ends a run: its last step, its results, its files and the next commands."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

from dagrl.orchestrator.outcome import RunOutcome
from dagrl.reporting.run_data.run_reader import read_run
from dagrl.reporting.summary import in_a_line, scores

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
        why = ", as run.stop_after says" if outcome.out_of_time else ""
        lines = [f"stopped after step {outcome.step}{took}{why}; `dagrl run` with the same folder goes on"]
    elif outcome.before:
        lines = [
            f"finished step {outcome.step} before; nothing is left to do, a larger run.steps (or run.epochs) goes on"
        ]
        if outcome.changed:
            lines.append(f"  without effect, and not noted in the folder: {outcome.changed}")
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
