"""Computes the plan of a pipeline file, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dagrl.backends.fit import Fit, fit, with_sleep_decided
from dagrl.backends.planning.changes import Edit
from dagrl.backends.planning.gpus import DEFAULT_GPU, gpu_named
from dagrl.config.errors import PipelineError
from dagrl.config.schema import Pipeline
from dagrl.planner.changes import nearest_change
from dagrl.plugins.isolation import isolated_imports
from dagrl.scheduler.placement import make_plan
from dagrl.validation import CheckedPipeline, check_file
from dagrl.validation.part import PartOptions, take_part


@dataclass(frozen=True, slots=True)
class Report:
    """A pipeline, the memory it needs, and the change that makes it fit."""

    checked: CheckedPipeline
    fit: Fit
    gpu: str
    """The GPU of groups that name none."""
    change: Edit | None
    """The smallest change that makes it fit; None if it fits, or if no tried change helps."""

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the plan, with ``sleep: auto`` decided."""
        return self.fit.pipeline

    @property
    def fits(self) -> bool:
        return not self.fit.problems


@isolated_imports()
def report(path: Path, overrides: Sequence[str], *, gpu: str = DEFAULT_GPU, part: PartOptions | None = None) -> Report:
    """Plan a pipeline file, or one part. Needs neither the data nor the weights.

    PipelineError if the file is wrong; PartError if it has no such part; ValueError for an unknown GPU or model.
    """
    checked = check_file(path, overrides, with_files=False)
    return report_of(checked if part is None else take_part(checked, part)[0], gpu=gpu)


@isolated_imports()
def report_of(checked: CheckedPipeline, *, gpu: str = DEFAULT_GPU) -> Report:
    """Plan a checked pipeline. ValueError for an unknown GPU or model."""
    gpu, loaded = gpu_named(gpu).name, checked.loaded
    pipeline = loaded.pipeline
    fitted = with_sleep_decided(fit(pipeline, make_plan(pipeline, checked.graph), gpu=gpu))

    def is_valid(change: Edit) -> bool:
        try:
            check_file(loaded.path, [*loaded.overrides, *change.overrides()], with_files=False)
        except PipelineError:
            return False
        return True

    change = nearest_change(checked.graph, fitted, gpu=gpu, is_valid=is_valid)
    return Report(checked, fitted, gpu, change)
