"""Prints a plan: sections of text for people, and one JSON object for programs.

Each part of a plan is a `ReportSection`: text, tables, and a key with plain values. `as_text` and `as_values` take a
list of them: `memory_sections` first, then those of `show_steps`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType

from dagrl.backends.fit import GroupFit, Tenant, gib
from dagrl.backends.planning.gpus import Gpu
from dagrl.backends.planning.memory import GIB, KINDS
from dagrl.config.schema import Pipeline
from dagrl.planner.showing.report import Report
from dagrl.tables import render, table
from dagrl.validation.summary import layout_in_words

_BAR = 24
_NOTHING = "-"
_STAYS = "stays awake"


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A part of the plan."""

    content: Sequence[RenderableType]
    key: str
    value: object
    """An item of the JSON list with that key; None adds none."""


def as_text(report: Report, sections: Iterable[ReportSection]) -> str:
    shape = report.fit.shape
    size = f"{_count(shape.parameters)} parameters"
    if shape.experts is not None:
        size += f", {_count(shape.active_parameters)} of them for each token"
    parts: list[RenderableType] = [f"{report.checked.loaded.path}: {report.pipeline.name}, {size}"]
    for section in sections:
        if section.content:
            parts += ["", *section.content]
    return render(parts)


def as_values(report: Report, sections: Iterable[ReportSection]) -> dict[str, object]:
    """Plain values, which docs/plan.md describes."""
    shape = report.fit.shape
    values: dict[str, object] = {
        "pipeline": report.pipeline.name,
        "fits": report.fits,
        "model": {"parameters": shape.parameters, "active_parameters": shape.active_parameters},
        "problems": [
            {"group": problem.group, "engine": problem.engine, "over_bytes": problem.over, "text": problem.text}
            for problem in report.fit.problems
        ],
        "change": report.change and report.change.overrides(),
    }
    lists: dict[str, list[object]] = {}
    for section in sections:
        items = lists.setdefault(section.key, [])
        if section.value is not None:
            items.append(section.value)
    return values | lists


def why_gpu_is_unused(pipeline: Pipeline) -> str | None:
    """The reason why ``--gpu`` has no effect on a pipeline; None if it has one."""
    if all(group.is_cpu for group in pipeline.groups.values()):
        return "all groups have CPU slots"
    if all(group.is_cpu or group.gpu for group in pipeline.groups.values()):
        return "all groups of GPUs name theirs in the file (`gpu:`)"
    return None


def problems_in_words(report: Report) -> list[str]:
    """One line for each engine that does not fit, and one with the remedy; empty if all fit."""
    if report.fits:
        return []
    lines = [f"dagrl plan: group {problem.group}: {problem.text}" for problem in report.fit.problems]
    if report.change is None:
        return [*lines, "dagrl plan: no change that was tried makes it fit; use more or larger GPUs"]
    return [*lines, f"dagrl plan: it fits with {' '.join(report.change.overrides())}"]


def memory_sections(report: Report) -> list[ReportSection]:
    """One section for each group: its engines, their memory by kind, and how full its GPUs are at each moment."""
    return [
        ReportSection(list(_group_content(report.pipeline, group)), "groups", _group_value(group))
        for group in report.fit.groups
    ]


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e8 else f"{parameters / 1e6:.2f} million"


def _group_content(pipeline: Pipeline, group: GroupFit) -> Iterator[RenderableType]:
    slots = group.nodes * group.slots_per_node
    kind = f"{group.gpu.name} of {group.gpu.memory_gib:g} GiB" if group.gpu else "CPU slot"
    machines = f"{group.nodes} machines" if group.nodes > 1 else "1 machine"
    yield f"group {group.name}: {slots} x {kind}, {machines}"
    if not group.tenants:
        yield "  no engine"
        return
    yield from ("", _memory_table(pipeline, group))
    if group.gpu is not None:
        yield from ("", _moments_table(group, group.gpu))
        if group.host_per_node:
            yield from ("", f"  host memory: {gib(group.host_per_node)} GiB of each machine hold offloaded states")
    if notes := [f"  {tenant.name}: {note}" for tenant in group.tenants for note in tenant.memory.notes]:
        yield from ("", *notes)


def _memory_table(pipeline: Pipeline, group: GroupFit) -> RenderableType:
    tenants = group.tenants
    unit, unit_bytes = ("GiB", GIB) if max(tenant.memory.peak for tenant in tenants) >= GIB else ("MiB", 2**20)

    def size_of(nbytes: float) -> str:
        return f"{nbytes / unit_bytes:.1f}"

    rows = [
        ["layout", *(layout_in_words(pipeline, tenant.name) for tenant in tenants)],
        ["fullest in", *(tenant.memory.moment for tenant in tenants)],
    ]
    for kind in KINDS:
        sizes = [tenant.memory.awake.get(kind, 0) for tenant in tenants]
        if any(sizes):
            rows.append([kind, *(size_of(size) if size else _NOTHING for size in sizes)])
    rows.append(["awake", *(size_of(tenant.memory.peak) for tenant in tenants)])
    if any(tenant.executor.sleeps for tenant in tenants):
        sleepers = [(tenant.memory, tenant.executor.sleeps) for tenant in tenants]
        rows.append(
            ["weights alone", *(size_of(tenant.weights_alone) if sleeps else _STAYS for tenant, sleeps in sleepers)]
        )
        rows.append(["asleep", *(size_of(tenant.asleep) if sleeps else _STAYS for tenant, sleeps in sleepers)])
        if not all(sleeps for _, sleeps in sleepers):
            resting = (
                _NOTHING if tenant.executor.sleeps else size_of(group.at_rest[tenant.name]) for tenant in tenants
            )
            rows.append(["at rest", *resting])
    if group.gpu is not None and any(tenant.memory.host for tenant in tenants):
        rows.append(
            ["on the host", *(size_of(size) if (size := tenant.memory.host) else _NOTHING for tenant in tenants)]
        )
    names = (" + ".join(tenant.executor.engines) for tenant in tenants)
    return table(rows, headings=[f"{unit} on the fullest {'GPU' if group.gpu else 'slot'}", *names])


def _moments_table(group: GroupFit, gpu: Gpu) -> RenderableType:
    rows = []
    for moment in sorted(group.moments, key=lambda moment: -moment.total):
        share = moment.total / gpu.memory_bytes
        bar = "#" * min(_BAR, round(share * _BAR))
        over = "  over" if share > 1 else ""
        rows.append([moment.what, gib(moment.total), f"{share:.0%}", f"|{bar.ljust(_BAR)}|{over}"])
    return table(rows, headings=[f"of {gpu.memory_gib:g} GiB are taken", "GiB", "", ""], left=(0, 3))


def _group_value(group: GroupFit) -> dict[str, object]:
    return {
        "name": group.name,
        "gpu": group.gpu and group.gpu.name,
        "gpu_bytes": group.gpu and group.gpu.memory_bytes,
        "nodes": group.nodes,
        "slots_per_node": group.slots_per_node,
        "host_bytes_per_node": group.host_per_node,
        "engines": [_tenant_value(tenant) for tenant in group.tenants],
        "moments": [
            {"what": moment.what, "engine": moment.engine, "bytes": moment.parts, "total_bytes": moment.total}
            for moment in (group.moments if group.gpu else ())
        ],
    }


def _tenant_value(tenant: Tenant) -> dict[str, object]:
    memory = tenant.memory
    return {
        "name": tenant.name,
        "engines": list(tenant.executor.engines),
        "sleeps": tenant.executor.sleeps,
        "fullest_in": memory.moment,
        "awake_bytes": {kind: memory.awake.get(kind, 0) for kind in KINDS},
        "peak_bytes": memory.peak,
        "weights_alone_bytes": memory.weights_alone,
        "asleep_bytes": memory.asleep,
        "host_bytes_per_rank": memory.host,
        "notes": list(memory.notes),
    }
