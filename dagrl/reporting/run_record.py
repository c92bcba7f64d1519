"""Reads the folder of a run, finished or not: `metrics.jsonl`, `timeline.json` and the pipeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dagrl.scheduler.intervals import Activity
from dagrl.tracking.run_file import run_text
from dagrl.tracking.timeline import parse_activities

_LARGEST = 1 << 1000


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run folder."""

    folder: Path
    steps: Sequence[dict[str, Any]]
    """Numeric metrics of each step in order, including ``step``."""
    spans: Sequence[Activity]
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
    spans = parse_activities((run_text(folder, "timeline.json") or "").splitlines(), folder / "timeline.json")
    torn = len(lines) - len(steps)
    return RunRecord(folder, sorted(steps, key=lambda step: step["step"]), spans, torn)


def parse_step(line: str) -> dict[str, Any] | None:
    """The numbers of a line of metrics.jsonl, including ``step``; None if it is torn."""
    try:
        step = json.loads(line)
        number = int(step["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    return {name: value for name, value in step.items() if _is_number(value)} | {"step": number}


def config_of(folder: Path) -> dict[str, Any]:
    """The pipeline of a run, as it is written; empty if it cannot be read."""
    try:
        tree = yaml.safe_load(run_text(folder, "pipeline.yaml") or "")
    except yaml.YAMLError:
        return {}
    return tree if isinstance(tree, dict) else {}


def _is_number(value: Any) -> bool:
    """Whether it is one that arithmetic in floating point takes. NaN and infinity are."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < _LARGEST)
