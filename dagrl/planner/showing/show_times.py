"""Formats what a run's times say of a plan, and the lower bound of a step."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType

from dagrl.config.errors import counted
from dagrl.planner.cost.bound import StepBound
from dagrl.planner.cost.run_times import Applied
from dagrl.planner.showing.show import ReportSection
from dagrl.tables import table

_BY = {
    "chain": "sampling, then training, at the data sheet's rates of {machine}",
    "overlap": "all work at once, at the data sheet's rates of {machine}",
    "host": "the nodes of the host, divided by run.host_workers",
}


def times_section(applied: Applied, *, searched: bool = False) -> ReportSection:
    """The cost model's seconds of each node of the run beside the measured ones, and where they are extrapolated.

    With `searched` they are extrapolated to other layouts.
    """
    times = applied.times
    nodes: list[dict[str, Any]] = [
        {
            "name": work.name,
            "executor": work.executor,
            "planned_s": times.estimated.get(work),
            "measured_s": measured,
            "factor": applied.calibration.work.get(work),
        }
        for work, measured in times.measured.items()
    ]
    rows = [
        [
            node["name"],
            node["executor"],
            "-" if node["planned_s"] is None else seconds_text(node["planned_s"]),
            seconds_text(node["measured_s"]),
            "-" if node["factor"] is None else f"{node['factor']:.2f}",
        ]
        for node in sorted(nodes, key=lambda node: -node["measured_s"])
    ]
    known = times.lengths
    sizes = [
        f"{what} of {tokens:,.1f} tokens"
        for what, tokens in (("prompts", known.prompt_tokens), ("responses", known.response_tokens))
        if tokens is not None
    ]
    content: list[RenderableType] = [
        f"calibrated by {times.folder}: medians of {counted(times.steps, 'step')} up to {times.last}, each "
        f"{seconds_text(times.step_s)} s" + (f", with {' and '.join(sizes)} on average" if sizes else ""),
        "",
        table(rows, headings=["the run's own step", "on", "planned s", "measured s", "factor"], left=(0, 1)),
        "",
        f"  {seconds_text(times.calibration.driver_s)} s of a step are the driver's, which are added to each step",
    ]
    notes = list(applied.notes)
    if searched:
        notes.append(f"factors are extrapolated from the run's layout to all others: {times.layout}")
    content += [f"  {note}" for note in notes]
    value: dict[str, Any] = {
        "run": times.folder,
        "steps": times.steps,
        "last_step": times.last,
        "step_s": times.step_s,
        "driver_s": times.calibration.driver_s,
        "prompt_tokens": known.prompt_tokens,
        "response_tokens": known.response_tokens,
        "nodes": nodes,
        "extrapolated": notes,
    }
    return ReportSection(content, "calibrated_by", value)


def bound_line(bound: StepBound, step_s: float, machine: str) -> str:
    """The lower bound and its formula in words."""
    share = bound.seconds / step_s
    by = _BY[bound.by].format(machine=machine)
    return f"lower bound: {seconds_text(bound.seconds)} s a step, {share:.0%} of this: {by}, never idle"


def seconds_text(seconds: float) -> str:
    """Three digits, or tenths of a second."""
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2f}" if seconds >= 0.1 else f"{seconds:.3f}"
