"""The steps of a run that stand for the others: no start, no validation, no checkpoint."""

from __future__ import annotations

from dagrl.reporting.run_data.run_reader import RunReader
from dagrl.scheduler.plan import Plan

_MOST_STEPS = 200
"""The newest steps that are looked at."""


def usual_steps(run: RunReader, plan: Plan) -> list[int]:
    """The newest steps that neither are the first after a start, nor validate or save."""
    after_pause = {step + 1 for step, _ in run.pauses()}
    finished = {line["step"] for line in run.steps}
    steps = [step for step in run.timed_steps if step > 1 and step in finished and step not in after_pause]
    plain = [step for step in steps if not plan.validates(step) and not plan.saves(step)]
    return (plain or steps)[-_MOST_STEPS:]
