"""Places a checked pipeline on its groups: the plan, which engines sleep, and warnings of memory."""

from __future__ import annotations

from dataclasses import replace

from dagrl.backends.fit import place
from dagrl.scheduler.plan import Plan
from dagrl.validation import CheckedPipeline


def place_engines(checked: CheckedPipeline) -> tuple[CheckedPipeline, Plan]:
    """Decide ``sleep: auto``, and warn of each engine that does not fit on the GPUs that the file names.

    The memory is an estimate, so nothing is refused.
    """
    loaded = checked.loaded
    placed = place(loaded.pipeline, checked.graph)
    told = [
        loaded.positions.problem(
            ("groups", problem.group, "gpu"),
            f"estimated: {problem.text}; `dagrl plan` says what would fit",
        )
        for problem in (placed.fit.problems if placed.fit else ())
        if placed.pipeline.groups[problem.group].gpu
    ]
    loaded = replace(loaded, pipeline=placed.pipeline)
    return replace(checked, loaded=loaded, warnings=(*checked.warnings, *told)), placed.plan
