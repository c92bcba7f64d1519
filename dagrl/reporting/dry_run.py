"""Describes what `dagrl run` would start, and where. Starts nothing and writes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType

from dagrl.config.schema import Pipeline
from dagrl.orchestrator.cluster.ray_cluster import OWN, running_here
from dagrl.orchestrator.folder.examine import examine
from dagrl.planner.showing.report import Report, report_of
from dagrl.planner.showing.show import as_text, memory_sections
from dagrl.scheduler.plan import HOST, Executor
from dagrl.tables import render, table
from dagrl.validation import check_file
from dagrl.validation.part import PartOptions, take_part


def describe_start(
    path: Path, overrides: Sequence[str], run_dir: Path | None, part: PartOptions | None = None
) -> tuple[Report, str]:
    """Check and plan a pipeline; return its plan and the description. `run_dir` as in `dagrl run`.

    PipelineError if the pipeline is wrong, PartError if it has no such part, RefusedFolderError if the run may not use
    its folder.
    """
    checked, taken = check_file(path, overrides), None
    if part is not None:
        checked, taken = take_part(checked, part)
    planned = report_of(checked)
    pipeline = planned.pipeline
    folder = run_dir or Path("runs") / pipeline.name
    folder = taken.run_folder(folder) if taken is not None else folder
    folder_state, _ = examine(folder, checked.loaded.pipeline, checked.loaded.resolved)
    at = f"goes on after step {folder_state.state.step}" if folder_state.state else "begins"
    if pipeline.run.only_validates:
        at = f"validates {f'step {folder_state.state.step}' if folder_state.state else 'the start weights'}"
    elif folder_state.state and folder_state.state.finishes(pipeline.run, sum(checked.train_rows.values())):
        at = f"has finished step {folder_state.state.step}, so that nothing is left to do"
    address = os.environ.get("RAY_ADDRESS") or running_here()
    parts: list[RenderableType] = [
        "",
        f"run folder {folder}: the run {at}",
        f"Ray: joins the cluster at {address}" if address and address != OWN else "Ray: starts on this machine",
        "",
        "would start",
        table(
            (_row(pipeline, executor) for executor in planned.fit.plan.executors.values()),
            headings=["executor", "backend", "processes", "group", "machine: ranks"],
            left=(0, 1, 3, 4),
        ),
        "",
        "nothing was started or written",
    ]
    return planned, as_text(planned, memory_sections(planned)) + render(parts)


def _row(pipeline: Pipeline, executor: Executor) -> list[str]:
    if executor.name == HOST or executor.group is None:
        return [executor.name, "", str(executor.ranks), "", "spread over all machines"]
    engines = [pipeline.engines[name] for name in executor.engines]
    backend = ", ".join(dict.fromkeys(engine.backend for engine in engines))
    environment = engines[0].environment
    return [
        " + ".join(executor.engines),
        f"{backend} in {environment}" if environment else backend,
        str(executor.ranks),
        executor.group,
        ", ".join(_machines(pipeline, executor)),
    ]


def _machines(pipeline: Pipeline, executor: Executor) -> Iterator[str]:
    """The ranks of an executor by machine of its group: ``1: 0-7``."""
    group = pipeline.groups[str(executor.group)]
    slots = group.cpus_per_node if group.is_cpu else group.gpus_per_node
    per_machine = max(1, min(executor.ranks, slots))
    for machine, first in enumerate(range(0, executor.ranks, per_machine), start=1):
        last = min(first + per_machine, executor.ranks) - 1
        yield f"{machine}: {first}" + (f"-{last}" if last > first else "")
