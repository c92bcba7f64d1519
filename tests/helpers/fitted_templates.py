"""Templates of this project, loaded and fitted to a GPU."""

from __future__ import annotations

from pathlib import Path

from dagrl.backends.fit import Fit, fit
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema import Pipeline
from dagrl.graph.dag import Graph
from dagrl.graph.inference import build_graph
from dagrl.scheduler.placement import make_plan

TEMPLATES = Path(__file__).parents[2] / "dag_templates"
FOUR_GPUS = ("groups.gpu.gpus_per_node=4", "engines.actor.parallel.pipeline_model_parallel_size=2")
ONE_GPU = (
    "groups.gpu.gpus_per_node=1",
    "engines.actor.parallel={tensor_model_parallel_size: 1}",
    "engines.generator.server.tp_size=1",
)


def loaded(name: str, *overrides: str) -> tuple[Pipeline, Graph]:
    found = load_pipeline(TEMPLATES / f"{name}.yaml", overrides)
    return found.pipeline, build_graph(found.pipeline, found.folder, found.positions)


def fitted(name: str, gpu: str, *overrides: str) -> Fit:
    return planned(*loaded(name, *overrides), gpu=gpu)


def planned(pipeline: Pipeline, graph: Graph, *, gpu: str) -> Fit:
    return fit(pipeline, make_plan(pipeline, graph), gpu=gpu)
