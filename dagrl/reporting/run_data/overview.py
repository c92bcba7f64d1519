"""The first view of a run: progress, events, its pipeline and its DAG."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from dagrl.backends.fit import place
from dagrl.config.errors import PipelineError
from dagrl.config.loading.loader import LoadedPipeline, load_pipeline
from dagrl.config.schema import Pipeline
from dagrl.orchestrator.folder.run_graph import graph_of_run
from dagrl.redact import hide_secrets, without_secrets
from dagrl.reporting.run_data.dag_view import dag_view
from dagrl.reporting.run_data.run_reader import RunReader
from dagrl.reporting.run_data.sample_view import sample_steps
from dagrl.reporting.run_record import config_of
from dagrl.scheduler.plan import Plan
from dagrl.tracking.run_file import best_checkpoint, run_file, run_text
from dagrl.tracking.run_notes import run_notes

_LOG_CHARACTERS = 20_000
_MOST_RESTARTS = 1000.0
"""A file that says more is not a run's."""


def overview(run: RunReader) -> dict[str, Any]:
    """Progress, events, pipeline and DAG of a run."""
    described = _described(run.folder, _changed(run.folder / "pipeline.yaml"))
    return {
        "folder": str(run.folder),
        "last_step": run.last_step,
        "torn": run.torn,
        "notes": list(run_notes(run.steps, config_of(run.folder)).values()),
        "best": best_checkpoint(run.folder) or "",
        "failure": hide_secrets(run_text(run.folder, "logs", "failure.txt") or "")[-_LOG_CHARACTERS:],
        "events": _events(run),
        "samples": sample_steps(run.folder),
        "timed_steps": run.timed_steps,
        "seconds": [round(window.end - window.start, 4) for step in run.timed_steps if (window := run.window(step))],
        **described,
    }


@lru_cache(maxsize=64)
def _described(folder: Path, changed: int) -> dict[str, Any]:
    """The parts that follow from the pipeline alone; `changed` is the file's time of change."""
    loaded = pipeline_of(folder)
    return {
        "steps": None if isinstance(loaded, str) else loaded.pipeline.run.known_steps,
        "groups": {} if isinstance(loaded, str) else _groups(loaded.pipeline),
        "pipeline": _pipeline_text(folder),
        "dag": _dag(folder, loaded),
    }


def plan_of_run(folder: Path) -> Plan | None:
    """The plan of a run's pipeline; None if it cannot be read or placed."""
    return _plan(folder, _changed(folder / "pipeline.yaml"))


@lru_cache(maxsize=64)
def _plan(folder: Path, changed: int) -> Plan | None:
    loaded = pipeline_of(folder)
    if isinstance(loaded, str):
        return None
    try:
        return place(loaded.pipeline, graph_of_run(folder, loaded)).plan
    except (PipelineError, ValueError):
        return None


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns if path.is_file() else 0


def pipeline_of(folder: Path) -> LoadedPipeline | str:
    """The pipeline of a run, or why there is none that this version can read."""
    try:
        path = run_file(folder, "pipeline.yaml")
        return f"{folder} holds no pipeline.yaml" if path is None else load_pipeline(path)
    except (PipelineError, ValueError) as error:
        return str(error)


def _events(run: RunReader) -> list[dict[str, Any]]:
    """Restarts of workers and new starts of the run, by the step that followed or was under way."""
    found: list[dict[str, Any]] = []
    for span in run.spans:
        if span.name == "restart":
            what = f"{span.executor} restarted after a loss"
            found.append(
                {"step": span.step, "kind": "restart", "text": what, "seconds": round(span.end - span.start, 2)}
            )
    # The scheduler counts a loss in the step that ends next, while the restart belongs to the step that waits for it.
    told = [event["step"] for event in found]
    count = 0.0
    for line in run.steps:
        step, now = line["step"], line.get("run/restarts", 0.0)
        # Also false for NaN.
        now = now if 0 <= now <= _MOST_RESTARTS else count
        for _ in range(round(now - count)):
            own = next((each for each in told if each in (step, step + 1)), None)
            if own is None:
                found.append({"step": step, "kind": "restart", "text": "went on after a loss", "seconds": None})
            else:
                told.remove(own)
        count = now
    for step, seconds in run.pauses():
        found.append({"step": step, "kind": "pause", "text": "the run was not under way", "seconds": round(seconds, 1)})
    return sorted(found, key=lambda event: event["step"])


def _groups(pipeline: Pipeline) -> dict[str, str]:
    """Group -> its devices."""
    found = {}
    for name, group in pipeline.groups.items():
        what = "CPU slot" if group.is_cpu else group.gpu or "GPU"
        found[name] = f"{group.ranks} {what}{'s' if group.ranks > 1 else ''}"
    return found


def _pipeline_text(folder: Path) -> str:
    """The file without secrets; empty if there is none."""
    try:
        tree = yaml.safe_load(run_text(folder, "pipeline.yaml") or "")
    except (OSError, ValueError, yaml.YAMLError):
        return ""
    return yaml.safe_dump(without_secrets(tree), sort_keys=False) if isinstance(tree, dict) else ""


def _dag(folder: Path, loaded: LoadedPipeline | str) -> dict[str, Any]:
    if isinstance(loaded, str):
        return {"error": loaded}
    try:
        return dag_view(graph_of_run(folder, loaded))
    except PipelineError as error:
        return {"error": str(error)}
