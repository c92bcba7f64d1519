"""The steps of a run that stand for the others: no start, no validation, no checkpoint."""

from __future__ import annotations

from dagrl.reporting.run_data.run_reader import RunReader
from dagrl.scheduler.plan import Plan

LEAST_STEPS = 2
"""Least number of steps from which a usual one is found."""
_MOST_STEPS = 200
"""Number of the newest steps that are considered."""


def usual_steps(run: RunReader, plan: Plan) -> list[int]:
    """The newest steps that are not the first after a start, without those that validate or save if enough are left."""
    after_pause = {step + 1 for step, _ in run.pauses()}
    finished = {line["step"] for line in run.steps}
    steps = [step for step in run.timed_steps if step > 1 and step in finished and step not in after_pause]
    plain = [step for step in steps if not plan.validates(step) and not plan.saves(step)]
    return (plain if len(plain) >= LEAST_STEPS else steps)[-_MOST_STEPS:]
