"""What `dagrl plan` finds out about a pipeline file, before a GPU is touched."""

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
    """A pipeline, what it takes, and what would make it fit."""

    checked: CheckedPipeline
    """With ``sleep: auto`` decided."""
    fit: Fit
    gpu: str
    """What groups have that do not say."""
    change: Change | None
    """The nearest that makes it fit; None where it fits, or where nothing that was tried does."""

    @property
    def pipeline(self) -> Pipeline:
        """What was planned."""
        return self.checked.loaded.pipeline

    @property
    def fits(self) -> bool:
        """Whether every engine finds room."""
        return not self.fit.problems


@isolated_imports()
def report(path: Path, overrides: Sequence[str], *, gpu: str = DEFAULT_GPU) -> Report:
    """Of a pipeline file. Neither data nor weights need be there.

    PipelineError where the file is wrong; ValueError for a GPU or a model of which nothing is known.
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
