"""The GPUs that a run has used, as its workers have told."""

from __future__ import annotations

import json
from pathlib import Path

from dagrl.backends.planning.gpus import gpu_of_driver
from dagrl.config.schema import Pipeline
from dagrl.scheduler.plan import Plan
from dagrl.tracking.run_file import run_text


def with_gpus_of(folder: Path, pipeline: Pipeline, plan: Plan) -> Pipeline:
    """The pipeline, in which groups that do not name their GPUs have those of the run in `folder`, if it knows them."""
    found = {}
    for worker, told in _workers(folder).items():
        group = plan.executors[name].group if (name := worker.partition("/")[0]) in plan.executors else None
        gpu = gpu_of_driver(told.get("gpu", ""))
        if group is not None and gpu is not None and not pipeline.groups[group].gpu:
            found[group] = pipeline.groups[group].model_copy(update={"gpu": gpu.name})
    return pipeline.model_copy(update={"groups": pipeline.groups | found})


def _workers(folder: Path) -> dict[str, dict[str, str]]:
    """Read ``workers.json``: worker -> its entry. Empty if the run has no such file."""
    text = run_text(folder, "workers.json")
    return json.loads(text) if text else {}
