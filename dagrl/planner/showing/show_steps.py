"""Formats estimated times: seconds of a step and its nodes, idle GPUs, bytes along edges, and proposed layouts; and
the times of the run that calibrates them.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence

from rich.console import RenderableType

from dagrl.backends.planning.gpus import Gpu, gpu_named
from dagrl.config.errors import counted
from dagrl.config.schema import FilterNode, NodeBase, RolloutNode, SelectiveNode
from dagrl.config.schema.rounds import groups_returned
from dagrl.planner.cost.bound import StepBound, step_bound
from dagrl.planner.cost.calibration import Applied, Calibration, RunTimes, applied, devices_of
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.planner.cost.estimate import StepEstimate, estimate_step
from dagrl.planner.cost.lengths import Assumed
from dagrl.planner.search.proposals import Proposal, search
from dagrl.planner.search.space import Cluster, cluster_of
from dagrl.planner.showing.report import Report
from dagrl.planner.showing.show import ReportSection, memory_sections
from dagrl.scheduler.plan import PlannedTask
from dagrl.tables import table

_MIB = 2**20
_BY = {
    "chain": "sampling, then training, at the data sheet's rates of {machine}",
    "overlap": "all work at once, at the data sheet's rates of {machine}",
    "host": "the nodes of the host, divided by run.host_workers",
}


def plan_sections(report: Report, assumed: Assumed | None = None, times: RunTimes | None = None) -> list[ReportSection]:
    """A plan's memory, a step in the steady state, and the times of the run that calibrate it."""
    sections = [*memory_sections(report), step_section(report, assumed or Assumed(), times)]
    return [*sections, _times_section(_applied(report, times))] if times else sections


def step_section(report: Report, assumed: Assumed, times: RunTimes | None = None) -> ReportSection:
    """A step in the steady state, calibrated by `times`. ValueError if `assumed` contradicts the pipeline."""
    pipeline = report.pipeline
    if not report.fits:
        return ReportSection(["a step: not estimated, as it does not fit"], "steps", None)
    plan = report.fit.plan
    if plan.only_validates:
        return ReportSection(["a step: not estimated, as the run only validates"], "steps", None)
    calibration = _applied(report, times).calibration if times else Calibration()
    costs = PipelineCosts(pipeline, plan, report.fit.shape, report.gpu, assumed, calibration)
    estimate = estimate_step(costs)
    slots = sum(group.ranks for group in pipeline.groups.values())
    rate = estimate.response_tokens / estimate.step_s
    lengths = costs.lengths(_leading(report))
    content: list[RenderableType] = [
        f"a step: {seconds_text(estimate.step_s)} s, {rate:,.0f} response tokens/s, {rate / slots:,.0f} a slot",
        f"  with prompts of {lengths.prompt:,.0f} tokens and responses of {lengths.response:,.0f} on average, the "
        f"longest {lengths.longest:,}",
    ]
    if chooser := next((task.node for task in report.fit.plan.tasks if task.selects), None):
        content.append(f"  {_rounds(pipeline.nodes[chooser], chooser, report.fit.plan.expected_rounds)}")
    if buffer := next((task.node for task in report.fit.plan.tasks if task.replays), None):
        content.append(f"  with {groups_returned(pipeline)} groups that `{buffer}` returns once it holds that many")
    content += [
        f"  with all rows for `{name}`: which of them its `rows` choose is known only in the run"
        for name, node in pipeline.nodes.items()
        if isinstance(node, SelectiveNode) and node.rows is not None and costs.chosen_sources(node) is None
    ]
    content += [f"  {_answers(name, node)}" for name, node in pipeline.rollouts.items() if node.multi_turn]
    on_cpu = any(group.is_cpu for group in pipeline.groups.values())
    if on_cpu and times is None:
        content.append("  on CPU slots these are orders of magnitude")
    gpus = [gpu_named(group.gpu or report.gpu) for group in pipeline.groups.values() for _ in range(group.ranks)]
    bound = step_bound(costs, gpus) if gpus and not on_cpu else None
    if bound is not None:
        content.append(f"  {_bound_line(bound, estimate.step_s, _machine(gpus))}")
    content += ["", _stages(costs, estimate), "", _idle(estimate), "", _edges(estimate)]
    value = _value(estimate) | {
        "lower_bound_s": bound and bound.seconds,
        "response_tokens_per_s": rate,
        "assumed": {"prompt_tokens": lengths.prompt, "response_tokens": lengths.response},
    }
    return ReportSection(content, "steps", value)


def _applied(report: Report, times: RunTimes) -> Applied:
    plan = report.fit.plan
    return applied(times, report.pipeline, plan, devices_of(report.pipeline, plan, report.gpu))


def _leading(report: Report) -> PlannedTask:
    """The task whose rows the lengths describe: the rollout, or the update where nothing is sampled."""
    tasks = report.fit.plan.tasks
    leading = None if report.pipeline.is_offline else report.pipeline.leading_rollout
    sampled = next((task for task in tasks if task.name == leading), None)
    return sampled or next(task for task in tasks if task.trains or not task.inputs)


def search_sections(
    report: Report,
    *,
    gpu: str | None,
    assumed: Assumed,
    gpus: int | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    top: int = 5,
    times: RunTimes | None = None,
) -> list[ReportSection]:
    """Search layouts of a pipeline for `gpus` or `nodes`, by default for its own number of GPUs.

    `times` calibrate the search if its run had the same GPUs. ValueError if the call is wrong, or if a search cannot
    change the pipeline.
    """
    gpu = gpu_named(gpu).name if gpu is not None else None
    cluster = cluster_of(report.pipeline, gpus=gpus, nodes=nodes, gpus_per_node=gpus_per_node, gpu=gpu)
    sections, calibration = [], Calibration()
    if times is not None:
        there = dict.fromkeys(report.fit.plan.executors, cluster.gpu or report.gpu)
        by_run = applied(times, report.pipeline, report.fit.plan, there)
        sections, calibration = [_times_section(by_run, searched=True)], by_run.calibration
    proposals = search(report.checked, cluster, gpu=report.gpu, assumed=assumed, calibration=calibration, top=top)
    return [*sections, *proposal_sections(proposals, cluster, report.gpu)]


def proposal_sections(proposals: Sequence[Proposal], cluster: Cluster, gpu: str) -> list[ReportSection]:
    """The proposals of a search, the best one as overrides to paste; `gpu` is the cluster's if that names none."""
    looked_for = f"{cluster.gpus} x {cluster.gpu or gpu}, {cluster.gpus_per_node} on a machine"
    if not proposals:
        return [ReportSection([f"layouts for {looked_for}: none that was tried fits"], "proposals", None)]
    rows = []
    for number, proposal in enumerate(proposals, start=1):
        groups = " + ".join(f"{group.ranks} {name}" for name, group in proposal.placing.groups.items())
        idle = " + ".join(f"{share:.0%}" for share in proposal.estimate.idle.values())
        seconds, trainer = seconds_text(proposal.estimate.step_s), proposal.trainer.label()
        rows.append([f"{number}", seconds, groups, trainer, _servers(proposal) or "-", idle])
    content: list[RenderableType] = [f"layouts for {looked_for}, by the simulated step:", ""]
    content.append(table(rows, headings=["", "s a step", "groups", "trainer", "servers", "idle"]))
    best = proposals[0]
    machine = f"{cluster.gpus} x {cluster.gpu or gpu}"
    content += ["", f"  {_bound_line(best.bound, best.estimate.step_s, machine)}"]
    content += ["", "the first is this pipeline with", ""]
    content.append("  " + " \\\n  ".join(shlex.quote(override) for override in proposals[0].overrides))
    values = [
        _value(proposal.estimate)
        | {
            "groups": {
                name: group.model_dump(exclude_defaults=True) for name, group in proposal.placing.groups.items()
            },
            "trainer": proposal.trainer.label(),
            "servers": _servers(proposal),
            "lower_bound_s": proposal.bound.seconds,
            "overrides": list(proposal.overrides),
        }
        for proposal in proposals
    ]
    return [ReportSection(content if not number else [], "proposals", value) for number, value in enumerate(values)]


def _servers(proposal: Proposal) -> str | None:
    return proposal.server.label() if proposal.server else None


def _stages(costs: PipelineCosts, estimate: StepEstimate) -> RenderableType:
    rows = []
    for name, seconds in (*estimate.node_s.items(), *estimate.move_s.items()):
        executor = next((task.executor for task in costs.plan.tasks if task.name == name), "")
        rows.append([name, executor, seconds_text(seconds), f"{seconds / estimate.step_s:.0%}"])
    return table(rows, headings=["seconds of a step", "on", "s", "of the step"])


def _rounds(node: NodeBase, name: str, rounds: int) -> str:
    assert isinstance(node, FilterNode)
    often = "in one round" if rounds == 1 else f"in {rounds} rounds"
    if node.expected_kept_fraction is None:
        return f"{often}, as `{name}` does not set expected_kept_fraction"
    return f"{often}, as `{name}` is expected to keep {node.expected_kept_fraction:.0%} of the groups"


def _answers(name: str, node: RolloutNode) -> str:
    if node.expected_call_s is None:
        return f"tool calls of `{name}` take no time here, as it does not set expected_call_s"
    return f"`{name}` waits for {node.expected_answers:g} answers of {node.expected_call_s:g} s in each response"


def _idle(estimate: StepEstimate) -> RenderableType:
    return table(([f"group {name}", f"{share:.0%}"] for name, share in estimate.idle.items()), headings=["idle", ""])


def _edges(estimate: StepEstimate) -> RenderableType:
    rows = [
        [f"{writer} -> {reader}", f"{nbytes / _MIB:.2f}"] for (writer, reader), nbytes in estimate.edge_bytes.items()
    ]
    return table(rows, headings=["data of a step", "MiB"])


def _machine(gpus: Sequence[Gpu]) -> str:
    return " + ".join(f"{count} x {name}" for name, count in Counter(gpu.name for gpu in gpus).items())


def _value(estimate: StepEstimate) -> dict[str, object]:
    return {
        "step_s": estimate.step_s,
        "node_s": dict(estimate.node_s),
        "move_s": dict(estimate.move_s),
        "idle": dict(estimate.idle),
        "edges": [
            {"from": writer, "to": reader, "bytes": round(nbytes)}
            for (writer, reader), nbytes in estimate.edge_bytes.items()
        ],
    }


def _times_section(applied: Applied, *, searched: bool = False) -> ReportSection:
    """The cost model's seconds of each node of the run beside the measured ones, and notes on extrapolation.

    With `searched` they are extrapolated to other layouts.
    """
    times, factors = applied.times, applied.calibration.work
    rows = []
    for work, measured in sorted(times.measured.items(), key=lambda item: -item[1]):
        planned, factor = times.estimated.get(work), factors.get(work)
        rows.append(
            [
                work.name,
                work.executor,
                "-" if planned is None else seconds_text(planned),
                seconds_text(measured),
                "-" if factor is None else f"{factor:.2f}",
            ]
        )
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
    nodes = [
        {
            "name": work.name,
            "executor": work.executor,
            "planned_s": times.estimated.get(work),
            "measured_s": measured,
            "factor": factors.get(work),
        }
        for work, measured in times.measured.items()
    ]
    value = {
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


def _bound_line(bound: StepBound, step_s: float, machine: str) -> str:
    share = bound.seconds / step_s
    by = _BY[bound.by].format(machine=machine)
    return f"lower bound: {seconds_text(bound.seconds)} s a step, {share:.0%} of this: {by}, never idle"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2f}" if seconds >= 0.1 else f"{seconds:.3f}"
