"""Prepares a pipeline file for a run: its checked pipeline, its graph, and the plan of its engines on their groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dagrl.backends.fit import place
from dagrl.config.loading.hub import download
from dagrl.scheduler.plan import Plan
from dagrl.validation import CheckedPipeline, check_file
from dagrl.validation.part import Part, PartOptions, take_part


@dataclass(frozen=True, slots=True)
class PreparedPipeline(CheckedPipeline):
    """A pipeline without known problems, with ``sleep: auto`` decided, and its plan."""

    plan: Plan
    part: Part | None = None
    """The part of the pipeline that runs. None: all of it."""


def prepare(
    path: Path | str,
    overrides: Sequence[str] = (),
    *,
    with_weights: bool = False,
    part: PartOptions | None = None,
) -> PreparedPipeline:
    """Check a pipeline file and plan it, or one part. `with_weights`: fetch the weights of models of a hub first.

    PipelineError with all problems; HubError if weights cannot be fetched; PartError if the part does not exist.
    """
    checked = check_file(path, overrides)
    if with_weights and download(checked.loaded.pipeline):
        checked = check_file(path, overrides)
    if part is None:
        return placed(checked)
    checked, taken = take_part(checked, part)
    prepared = placed(checked)
    return replace(prepared, plan=taken.scheduled(prepared.plan, checked.loaded.pipeline), part=taken)


def placed(checked: CheckedPipeline) -> PreparedPipeline:
    """Decide ``sleep: auto``, and warn of each engine that does not fit on the GPUs that the file names.

    Memory is an estimate, so misfits are not refused.
    """
    loaded = checked.loaded
    placement = place(loaded.pipeline, checked.graph)
    warnings = [
        loaded.positions.problem(
            ("groups", problem.group, "gpu"),
            f"estimated: {problem.text}; `dagrl plan` says what would fit",
        )
        for problem in (placement.fit.problems if placement.fit else ())
        if placement.pipeline.groups[problem.group].gpu
    ]
    return PreparedPipeline(
        replace(loaded, pipeline=placement.pipeline),
        checked.graph,
        checked.rows,
        (*checked.warnings, *warnings),
        placement.plan,
    )
