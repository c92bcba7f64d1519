"""Seconds of the phases of a step, from what each framework writes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PHASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # verl's names in order of preference: `gen` of a step ahead is the wait for a generation that began before.
    "generation": (("timing_s/generate_async", "timing_s/gen"), ("time/rollout_s",)),
    "old log-probs": (("timing_s/old_log_prob",), ("time/old_s",)),
    "update": (("timing_s/update_actor",), ("time/update_s",)),
    "weight sync": (("timing_s/sync_rollout_weights", "timing_s/update_weights"), ("time/sync_s",)),
    "step": (("timing_s/step",), ("time/step_s",)),
}
"""Phase -> the names of its seconds in the metrics of verl, and of dagrl."""


def verl_steps(file: Path) -> list[dict[str, Any]]:
    """Metrics of each step from the file of verl's `file` logger. ValueError if it has no step."""
    lines = [json.loads(line)["data"] for line in file.read_text().splitlines()]
    steps = [line for line in lines if "timing_s/step" in line]
    if not steps:
        raise ValueError(f"{file}: verl has logged no step")
    return steps


def medians(steps: Sequence[Mapping[str, Any]], side: int, warmup: int) -> dict[str, float]:
    """Median seconds of each phase after the first `warmup` steps. `side`: 0 for verl, 1 for dagrl."""
    measured = steps[warmup:]
    if not measured:
        raise ValueError(f"{len(steps)} steps, all of them warm-up; give more --steps")
    found = {}
    for phase, sides in PHASES.items():
        # Some steps of a run that is a step ahead have no weight sync of their own.
        taken = next((values for name in sides[side] if (values := [s[name] for s in measured if name in s])), None)
        if taken is not None:
            found[phase] = statistics.median(taken)
    return found


def table(seconds: Mapping[str, Mapping[str, float]]) -> str:
    """Lines of seconds by phase, and verl's over dagrl's where both have the phase."""
    lines = [f"{'seconds':16}" + "".join(f"{name:>10}" for name in seconds) + f"{'ratio':>10}"]
    for phase in PHASES:
        cells = "".join(f"{each[phase]:10.3f}" if phase in each else f"{'':10}" for each in seconds.values())
        ratio = ratios(seconds).get(phase)
        lines.append(f"{phase:16}{cells}" + (f"{ratio:10.2f}" if ratio is not None else ""))
    return "\n".join(line.rstrip() for line in lines)


def ratios(seconds: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return verl's seconds over dagrl's for each phase that both have."""
    verl, dagrl = seconds.get("verl", {}), seconds.get("dagrl", {})
    return {phase: verl[phase] / dagrl[phase] for phase in PHASES if phase in verl and dagrl.get(phase)}
