"""Warnings of engines for which the plan finds no room, where the file says what GPUs a group has.

It is a reckoning, so that nothing is refused by it; but what it says here a run says minutes later, out of memory.
"""

from __future__ import annotations

from dataclasses import replace

from dagrl.planner.fitting.fit import fit
from dagrl.validation import CheckedPipeline


def warn_of_memory(checked: CheckedPipeline) -> CheckedPipeline:
    """The same with a warning for each engine that does not fit; its sleep is decided."""
    pipeline, positions = checked.loaded.pipeline, checked.loaded.positions
    if not any(group.gpu for group in pipeline.groups.values()):
        return checked
    try:
        problems = fit(pipeline, checked.graph).problems
    except ValueError:
        # Of a model that nobody here knows, nothing can be said.
        return checked
    told = [
        positions.problem(
            ("groups", problem.group, "gpu"),
            f"by the plan's reckoning {problem.text.partition(': ')[2]}; `dagrl plan` says what would fit",
        )
        for problem in problems
        if pipeline.groups[problem.group].gpu
    ]
    return replace(checked, warnings=(*checked.warnings, *told))
