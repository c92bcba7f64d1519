"""Computes the plan of a pipeline file, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dagrl.config.errors import PipelineError
from dagrl.config.schema import Pipeline
from dagrl.graph.plugins.isolation import isolated_imports
from dagrl.planner.fitting.changes import Change, nearest_change
from dagrl.planner.fitting.fit import Fit, fit
from dagrl.planner.fitting.sleep_policy import decide_sleep
from dagrl.planner.hardware import DEFAULT_GPU, gpu_named
from dagrl.validation import CheckedPipeline, check_file


@dataclass(frozen=True, slots=True)
class Report:
    """A pipeline, the memory it needs, and the change that makes it fit."""

    checked: CheckedPipeline
    """With ``sleep: auto`` decided."""
    fit: Fit
    gpu: str
    """The GPU of groups that name none."""
    change: Change | None
    """The smallest change that makes it fit; None if it fits, or if no change that was tried helps."""

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the plan."""
        return self.checked.loaded.pipeline

    @property
    def fits(self) -> bool:
        """Whether every engine fits."""
        return not self.fit.problems


@isolated_imports()
def report(path: Path, overrides: Sequence[str], *, gpu: str = DEFAULT_GPU) -> Report:
    """Plan a pipeline file. Needs neither the data nor the weights.

    PipelineError if the file is wrong; ValueError for an unknown GPU or model.
    """
    gpu = gpu_named(gpu).name
    checked = decide_sleep(check_file(path, overrides, with_files=False))
    pipeline = checked.loaded.pipeline
    found = fit(pipeline, checked.graph, gpu=gpu)

    def is_valid(change: Change) -> bool:
        try:
            check_file(path, [*overrides, *change.overrides()], with_files=False)
        except PipelineError:
            return False
        return True

    change = nearest_change(pipeline, checked.graph, found, gpu=gpu, is_valid=is_valid)
    return Report(checked, found, gpu, change)
