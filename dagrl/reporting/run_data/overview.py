"""The first view of a run: progress, events, its pipeline and its DAG."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache

import yaml

from dagrl.config.errors import PipelineError, counted
from dagrl.config.schema import Pipeline
from dagrl.graph.dag import Graph
from dagrl.graph.drawing.draw import arrows_of, executor_of, scene_of, subtitle_of
from dagrl.redact import hide_secrets, without_secrets
from dagrl.reporting.run_data.run_reader import RunPipeline, RunReader, config_of
from dagrl.reporting.run_data.sample_view import sample_steps
from dagrl.tracking.metrics_file import accounts
from dagrl.tracking.run_file import best_checkpoint, run_text
from dagrl.tracking.run_notes import run_notes

_LOG_CHARACTERS = 20_000
_MOST_RESTARTS = 1000.0
"""A larger number is not from a run."""


def overview(run: RunReader) -> dict[str, object]:
    config = config_of(run.folder)
    return {
        "folder": str(run.folder),
        "last_step": run.last_step,
        "torn": run.torn,
        "notes": list(run_notes(run.steps, config).values()),
        "best": best_checkpoint(run.folder) or "",
        "failure": hide_secrets(run_text(run.folder, "logs", "failure.txt") or "")[-_LOG_CHARACTERS:],
        "account": [asdict(account) for account in accounts(run.steps)],
        "events": _events(run),
        "samples": sample_steps(run.folder),
        "timed_steps": run.timed_steps,
        "seconds": [round(window.end - window.start, 4) for step in run.timed_steps if (window := run.window(step))],
        **_described(run, config),
    }


def _described(run: RunReader, config: dict[str, object]) -> dict[str, object]:
    text = yaml.safe_dump(without_secrets(config), sort_keys=False) if config else ""
    try:
        pipeline = run.pipeline()
    except ValueError as error:
        return {"steps": None, "groups": {}, "pipeline": text, "dag": {"error": str(error)}}
    loaded = pipeline.loaded.pipeline
    return {"steps": loaded.run.known_steps, "groups": _groups(loaded), "pipeline": text, "dag": _dag(pipeline)}


@lru_cache(maxsize=64)
def _dag(pipeline: RunPipeline) -> dict[str, object]:
    try:
        return dag_view(pipeline.graph)
    except PipelineError as error:
        return {"error": str(error)}


def _events(run: RunReader) -> list[dict[str, object]]:
    """Restarts of workers and new starts of the run, by the next step or the step in progress, and alarms."""
    events: list[tuple[int, str, str, float | None]] = [
        (span.step, "restart", f"{span.executor} restarted after a loss", round(span.end - span.start, 2))
        for span in run.spans
        if span.name == "restart"
    ]
    # The scheduler counts a loss in the step that ends next, but the restart belongs to the step that waits for it.
    restarts = [step for step, *_ in events]
    count = 0.0
    for line in run.steps:
        step, now = int(line["step"]), line.get("run/restarts", 0.0)
        # Also false for NaN.
        now = now if 0 <= now <= _MOST_RESTARTS else count
        for _ in range(round(now - count)):
            own = next((number for number in restarts if number in (step, step + 1)), None)
            if own is None:
                events.append((step, "restart", "went on after a loss", None))
            else:
                restarts.remove(own)
        count = now
    events += [(step, "pause", "the run was not under way", round(seconds, 1)) for step, seconds in run.pauses()]
    events += [(alarm.step, "alarm", str(alarm), None) for alarm in run.alarms()]
    names = ("step", "kind", "text", "seconds")
    return [dict(zip(names, event, strict=True)) for event in sorted(events, key=lambda event: event[0])]


def _groups(pipeline: Pipeline) -> dict[str, str]:
    return {
        name: counted(group.ranks, "CPU slot" if group.is_cpu else group.gpu or "GPU")
        for name, group in pipeline.groups.items()
    }


_MARGIN = 12.0
_BOX_WIDTH, _BOX_HEIGHT = 172.0, 66.0
"""Height of a line with time and memory below the node's name, in pixels."""


def dag_view(graph: Graph) -> dict[str, object]:
    """``nodes`` and ``labels`` with their boxes [x, y, width, height], and ``edges`` as lists of points, in pixels."""
    scene, bounds = scene_of(graph, box_height=_BOX_HEIGHT, least_width=_BOX_WIDTH)
    left, top = (bounds["min"][axis] - _MARGIN for axis in "xy")

    def place(rect: dict[str, float]) -> list[float]:
        return [round(rect["x"] - left, 1), round(rect["y"] - top, 1), rect["w"], rect["h"]]

    boxes, labels = scene["nodes"][: len(graph.nodes)], scene["nodes"][len(graph.nodes) :]
    return {
        "width": round(bounds["max"]["x"] + _MARGIN - left, 1),
        "height": round(bounds["max"]["y"] + _MARGIN - top, 1),
        "nodes": [
            {
                "name": name,
                "subtitle": subtitle_of(graph, name),
                "executor": executor_of(node) if node.spec is not None else "",
                "skipped": graph.skipped.get(name, ""),
                "box": place(box["rect"]),
            }
            for (name, node), box in zip(graph.nodes.items(), boxes, strict=True)
        ],
        "labels": [
            {"columns": columns, "box": place(label["rect"])}
            for columns, label in zip(arrows_of(graph).values(), labels, strict=True)
        ],
        "edges": [
            {
                "points": [[round(point["x"] - left, 1), round(point["y"] - top, 1)] for point in edge["points"]],
                "arrow": edge["marker_end"]["kind"] != "none",
            }
            for edge in scene["edges"]
        ],
    }
