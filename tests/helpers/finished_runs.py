"""Folders of runs as `dagrl run` leaves them, made without engines: by the simulator and the trackers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dagrl.config.loading.loader import load_pipeline
from dagrl.graph.inference import build_graph
from dagrl.planner.simulation.costs import CostTable
from dagrl.planner.simulation.simulate import Simulated, simulate
from dagrl.scheduler.placement import make_plan
from dagrl.tracking.timeline import Timeline

TEMPLATE = Path(__file__).parents[2] / "dag_templates" / "tiny_grpo.yaml"
SECONDS = CostTable({"rollout": 3.0, "reward": 1.0, "update": 2.0}, sync=1.0, save=8.0)
BEGIN = 1e9


def write_run(folder: Path, *overrides: str, steps: int = 4, costs: CostTable = SECONDS) -> Path:
    """A run of the demo whose commands took just the seconds of `costs`."""
    folder.mkdir(parents=True)
    loaded = load_pipeline(TEMPLATE, ["schedule.shards_per_step=2", "run.validate_first=false", *overrides])
    (folder / "pipeline.yaml").write_text(loaded.to_yaml())
    simulated = simulate(make_plan(loaded.pipeline, build_graph(loaded.pipeline)), costs, steps)
    write_timeline(folder, simulated)
    lines = [
        {"step": step, "time/step_s": seconds, "reward/mean": step / 10, "run/restarts": 0}
        for step, seconds in simulated.step_seconds.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_timeline(folder: Path, simulated: Simulated) -> None:
    timeline = Timeline()
    timeline.start(folder, None)
    timeline.extend(each._replace(start=BEGIN + each.start, end=BEGIN + each.end) for each in simulated.activities)
    timeline.close()


def write_samples(folder: Path, step: int, rows: list[dict[str, Any]], *, validation: bool = False) -> None:
    (folder / "samples").mkdir(exist_ok=True)
    path = folder / "samples" / f"step_{step}{'_val' if validation else ''}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)


def sample(number: int, **more: Any) -> dict[str, Any]:
    """A row of `samples/step_N.parquet`."""
    return {
        "sample_id": number,
        "group_id": number // 2,
        "data_set": "train",
        "data_source": "sums",
        "prompt": "1+1=",
        "answer": "2",
        "response": "2<eos>",
        "reward": 1.0,
        "response_tokens": [4, 1],
        "advantage": 0.5,
        "finish_reason": "stop",
        **more,
    }
