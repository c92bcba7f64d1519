"""What `dagrl plan` prints: sections of text for people, and one JSON object for programs.

Each part of a plan is a `Section`: lines, and a key with plain values. `memory_sections` are the first; whoever finds
out more adds sections of its own to the list that `as_text` and `as_json` take.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dagrl.config.schema import Pipeline
from dagrl.planner.fitting.fit import GroupFit, Tenant, gib
from dagrl.planner.memory.estimate import GIB, KINDS
from dagrl.planner.showing.report import Report
from dagrl.validation.summary import layout_in_words

_BAR = 24
_NOTHING = "-"
_STAYS = "stays awake"


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the plan."""

    lines: Sequence[str]
    key: str
    value: Any
    """As JSON has it, in a list of those of all sections with that key; None for nothing to say."""


def as_text(report: Report, sections: Iterable[Section]) -> str:
    """All sections, an empty line between them."""
    shape = report.fit.shape
    size = f"{_count(shape.parameters)} parameters"
    if shape.experts is not None:
        size += f", {_count(shape.active_parameters)} of them for each token"
    lines = [f"{report.checked.loaded.path}: {report.pipeline.name}, {size}"]
    for section in sections:
        if section.lines:
            lines += ["", *section.lines]
    return "\n".join(lines) + "\n"


def as_json(report: Report, sections: Iterable[Section]) -> str:
    """One object; bytes and counts are whole numbers. docs/plan.md describes it."""
    shape = report.fit.shape
    found: dict[str, Any] = {
        "pipeline": report.pipeline.name,
        "fits": report.fits,
        "model": {"parameters": shape.parameters, "active_parameters": shape.active_parameters},
        "problems": [
            {"group": each.group, "engine": each.engine, "over_bytes": each.over, "text": each.text}
            for each in report.fit.problems
        ],
        "change": report.change and report.change.overrides(),
    }
    for section in sections:
        values = found.setdefault(section.key, [])
        if section.value is not None:
            values.append(section.value)
    return json.dumps(found, indent=2) + "\n"


def problems_in_words(report: Report) -> list[str]:
    """A line for each engine that does not find room, and one that says what would help; none where all fits."""
    if report.fits:
        return []
    lines = [f"dagrl plan: {problem.text}" for problem in report.fit.problems]
    if report.change is None:
        return [*lines, "dagrl plan: nothing that was tried makes it fit; give it more GPUs, or larger ones"]
    return [*lines, f"dagrl plan: it fits with {' '.join(report.change.overrides())}"]


def memory_sections(report: Report) -> list[Section]:
    """Of each group: the engines on it, their memory by kind, and how full its GPUs are by turns."""
    return [Section(_group_lines(report.pipeline, group), "groups", _group_value(group)) for group in report.fit.groups]


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e8 else f"{parameters / 1e6:.2f} million"


def _group_lines(pipeline: Pipeline, group: GroupFit) -> list[str]:
    slots = group.nodes * group.slots_per_node
    kind = f"{group.gpu.name} of {group.gpu.memory_gib:g} GiB" if group.gpu else "CPU slot"
    machines = f"{group.nodes} machines" if group.nodes > 1 else "1 machine"
    lines = [f"group {group.name}: {slots} x {kind}, {machines}"]
    if not group.tenants:
        return [*lines, "  no engine is here"]
    lines += ["", *(f"  {line}" for line in _table(pipeline, group))]
    if group.gpu is not None:
        lines += ["", *(f"  {line}" for line in _turns(group))]
        if group.host_per_node:
            lines += ["", f"  host memory: {gib(group.host_per_node)} GiB of each machine wait for its devices"]
    notes = [f"  {tenant.name}: {note}" for tenant in group.tenants for note in tenant.memory.notes]
    return [*lines, "", *notes] if notes else lines


def _table(pipeline: Pipeline, group: GroupFit) -> list[str]:
    """A column for each engine, a row for each kind of memory that one of them has."""
    tenants = group.tenants
    unit, size_of = _unit(max(tenant.memory.peak for tenant in tenants))
    rows = [[f"{unit} on the fullest {'GPU' if group.gpu else 'slot'}", *map(_names, tenants)]]
    rows.append(["layout", *(layout_in_words(pipeline, tenant.name) for tenant in tenants)])
    rows.append(["fullest in", *(tenant.memory.moment for tenant in tenants)])
    for kind in KINDS:
        sizes = [tenant.memory.awake.get(kind, 0) for tenant in tenants]
        if any(sizes):
            rows.append([kind, *(size_of(size) if size else _NOTHING for size in sizes)])
    rows.append(["awake", *(size_of(tenant.memory.peak) for tenant in tenants)])
    if any(tenant.executor.sleeps for tenant in tenants):
        sleepers = [(tenant.memory, tenant.executor.sleeps) for tenant in tenants]
        rows.append(
            ["weights alone", *(size_of(each.weights_alone) if sleeps else _STAYS for each, sleeps in sleepers)]
        )
        rows.append(["asleep", *(size_of(each.asleep) if sleeps else _STAYS for each, sleeps in sleepers)])
    if group.gpu is not None and any(tenant.memory.host for tenant in tenants):
        rows.append(["on the host", *(size_of(size) if (size := each.memory.host) else _NOTHING for each in tenants)])
    return aligned(rows)


def _names(tenant: Tenant) -> str:
    return " + ".join(tenant.executor.engines)


def _unit(largest: int) -> tuple[str, Callable[[float], str]]:
    """GiB, or MiB where all is small."""
    return ("GiB", gib) if largest >= GIB else ("MiB", lambda nbytes: f"{nbytes / 2**20:.1f}")


def _turns(group: GroupFit) -> list[str]:
    """How full a GPU is when."""
    assert group.gpu is not None
    rows = []
    for moment in sorted(group.moments, key=lambda moment: -moment.total):
        share = moment.total / group.gpu.memory_bytes
        bar = "#" * min(_BAR, round(share * _BAR))
        over = "  over" if share > 1 else ""
        rows.append([moment.what, gib(moment.total), f"{share:.0%}", f"|{bar.ljust(_BAR)}|{over}"])
    return aligned([[f"of {group.gpu.memory_gib:g} GiB are taken", "GiB", "", ""], *rows])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Names to the left, all else to the right of its column; bars to the left too."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i == 0 or cell.startswith("|") else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _group_value(group: GroupFit) -> dict[str, Any]:
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


def _tenant_value(tenant: Tenant) -> dict[str, Any]:
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
