"""The content of a run folder, finished or not: metrics, activities and the pipeline as it is written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dagrl.scheduler.intervals import Activity
from dagrl.tracking.run_file import run_text

_LARGEST = 1 << 1000


@dataclass(eq=False)
class RunRecord:
    """Metrics and activities of a run."""

    folder: Path
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Numeric metrics of each step in order, including ``step``."""
    spans: list[Activity] = field(default_factory=list)
    """In the order of their starts."""
    torn: int = 0
    """Number of unreadable lines in metrics.jsonl."""

    @property
    def last_step(self) -> int:
        """The newest finished step; 0 without any."""
        return self.steps[-1]["step"] if self.steps else 0

    def of(self, name: str) -> list[float]:
        """Values of a metric in all steps that have it."""
        return [line[name] for line in self.steps if isinstance(line.get(name), int | float)]

    def in_training(self, name: str) -> list[float]:
        """The same without the validation before the first step, which is step 0."""
        return [line[name] for line in self.steps if line["step"] > 0 and isinstance(line.get(name), int | float)]


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
