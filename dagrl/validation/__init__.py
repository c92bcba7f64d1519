"""Rules between sections of a pipeline and about files on disk, checked before a run.

`check_file` is the entry point for the command line and the runtime. Each module checks one topic and reports to
`Findings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dagrl.backends.backend import EngineCheck
from dagrl.backends.environments import faults
from dagrl.backends.registry import backend_of
from dagrl.config.errors import Problem
from dagrl.config.loading.loader import LoadedPipeline, load_pipeline
from dagrl.config.loading.positions import Findings
from dagrl.graph.dag import Graph
from dagrl.graph.inference import infer_graph
from dagrl.plugins.isolation import isolated_imports
from dagrl.validation.batches import check_batches
from dagrl.validation.buffers import check_buffers
from dagrl.validation.data_files import check_data_files
from dagrl.validation.distillation import check_distillation, check_distillation_in_graph
from dagrl.validation.engines import check_engines
from dagrl.validation.images import check_images
from dagrl.validation.model import check_models
from dagrl.validation.order import check_order
from dagrl.validation.rewards import check_rewards
from dagrl.validation.rollouts import check_rollouts, check_rollouts_in_graph
from dagrl.validation.run import check_run
from dagrl.validation.schedule import check_schedule
from dagrl.validation.scorers import check_scorers
from dagrl.validation.sources import check_sources
from dagrl.validation.telling import check_telling, check_told_lengths
from dagrl.validation.tokenizers import check_own_models, check_tokenizers
from dagrl.validation.training import check_training, check_training_in_graph
from dagrl.validation.unused_options import check_unused_options
from dagrl.validation.whole_distributions import check_whole_distributions


@dataclass(frozen=True, slots=True)
class CheckedPipeline:
    """A pipeline without known problems."""

    loaded: LoadedPipeline
    graph: Graph
    rows: dict[str, int]
    """Rows of the sources, by their keys under ``data``: ``train``, ``train.NAME``, ``val``, ``val.NAME``."""
    warnings: tuple[Problem, ...]
    """Settings that are suspicious, but do not prevent a run."""

    @property
    def train_rows(self) -> dict[str, int]:
        """Rows of the training sources, by their names."""
        return {key.rpartition(".")[2]: rows for key, rows in self.rows.items() if key.startswith("train")}


def check_file(path: Path | str, overrides: Sequence[str] = (), *, with_files: bool = True) -> CheckedPipeline:
    """Load a pipeline file and check everything that needs no engine. PipelineError with all problems.

    Without `with_files`, data, weights and tokenizer need not exist: a run can be planned on another machine.
    """
    loaded = load_pipeline(path, overrides)
    with isolated_imports():
        return _checked(loaded, Findings(loaded.positions), with_files=with_files)


def _checked(loaded: LoadedPipeline, findings: Findings, *, with_files: bool) -> CheckedPipeline:
    pipeline, folder = loaded.pipeline, loaded.folder
    graph = infer_graph(pipeline, folder, findings)
    sizes = check_models(pipeline, findings, with_files=with_files)
    check_own_models(pipeline, findings)
    check_unused_options(pipeline, findings)
    rows = check_data_files(pipeline, graph, folder, findings) if with_files else {}
    if with_files:
        check_tokenizers(pipeline, findings)
    check_images(pipeline, graph, findings)
    check_engines(pipeline, findings)
    for name, engine in pipeline.engines.items():
        if engine.environment is not None:
            place = ("engines", name, "environment")
            for code, message in faults(engine.environment, backend_of(engine)):
                findings.error(place, message, code)
        backend_of(engine).validate(EngineCheck(pipeline, name, engine, sizes[name], findings))
    check_rewards(pipeline, folder, sizes, findings)
    check_scorers(pipeline, graph, sizes, findings)
    check_sources(pipeline, findings)
    check_rollouts(pipeline, folder, findings)
    check_training(pipeline, folder, findings)
    check_distillation(pipeline, findings)
    check_whole_distributions(pipeline, sizes, findings)
    check_telling(pipeline, findings)
    check_run(pipeline, folder, findings)
    check_order(pipeline, folder, findings)
    check_batches(pipeline, graph, sizes, findings)
    check_buffers(pipeline, graph, findings)
    check_schedule(pipeline, graph, findings)
    if graph is not None:
        check_rollouts_in_graph(pipeline, graph, findings)
        check_training_in_graph(pipeline, graph, findings)
        check_distillation_in_graph(pipeline, graph, findings)
        check_told_lengths(pipeline, graph, sizes, findings)
    findings.raise_if_any()
    assert graph is not None, "a pipeline without problems has a graph"
    return CheckedPipeline(loaded, graph, rows, tuple(sorted(set(findings.warnings))))
