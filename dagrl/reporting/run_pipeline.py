"""The pipeline in a run's folder, its graph and its plan. None of the modules that it names are imported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dagrl.backends.fit import Placement, place
from dagrl.backends.planning.gpus import gpu_of_driver
from dagrl.config.loading.loader import LoadedPipeline, load_pipeline
from dagrl.config.schema import Pipeline
from dagrl.graph.dag import Graph
from dagrl.orchestrator.folder.run_folder import graph_of_run
from dagrl.scheduler.plan import Plan
from dagrl.tracking.run_file import run_file, run_text


@dataclass(frozen=True, eq=False)
class RunPipeline:
    """A run's pipeline. The graph and what follows from it are PipelineError if the contract of a node is unknown."""

    folder: Path
    loaded: LoadedPipeline

    @cached_property
    def graph(self) -> Graph:
        return graph_of_run(self.folder, self.loaded)

    @cached_property
    def _placement(self) -> Placement:
        return place(self.loaded.pipeline, self.graph)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline with ``sleep: auto`` decided."""
        return self._placement.pipeline

    @property
    def plan(self) -> Plan:
        return self._placement.plan

    @cached_property
    def on_its_gpus(self) -> Pipeline:
        """The pipeline, in which groups that name no GPUs have those that the run's workers have reported."""
        groups = dict(self.pipeline.groups)
        workers = json.loads(run_text(self.folder, "workers.json") or "{}")
        for worker, entry in workers.items():
            executor = self.plan.executors.get(worker.partition("/")[0])
            gpu = gpu_of_driver(entry.get("gpu", ""))
            if executor and executor.group and gpu and not self.pipeline.groups[executor.group].gpu:
                groups[executor.group] = groups[executor.group].model_copy(update={"gpu": gpu.name})
        return self.pipeline.model_copy(update={"groups": groups})


def pipeline_of_run(folder: Path, overrides: Sequence[str] = ()) -> RunPipeline:
    """Load the pipeline of a run, with overrides. PipelineError if it is wrong; ValueError if there is none."""
    path = run_file(folder, "pipeline.yaml")
    if path is None:
        raise ValueError(f"{folder} holds no pipeline.yaml")
    return RunPipeline(folder, load_pipeline(path, overrides))
