"""Everything that must hold before a run beyond the form of the file: rules between sections, and files on disk.

`check_file` is the door for the command line and the runtime. One module for each concern, each a function that looks
at a pipeline and reports to `Findings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dagrl.backends.backend import EngineCheck
from dagrl.backends.registry import backend_of
from dagrl.config.errors import Problem
from dagrl.config.loading.loader import LoadedPipeline, load_pipeline
from dagrl.config.loading.positions import Findings
from dagrl.graph.dag import Graph, infer_graph
from dagrl.graph.plugins.isolation import isolated_imports
from dagrl.validation.batches import check_batches
from dagrl.validation.critic import check_critic
from dagrl.validation.data_files import check_data_files
from dagrl.validation.engine_options import check_engine_options
from dagrl.validation.engines import check_engines
from dagrl.validation.filter import check_filter
from dagrl.validation.formulas import check_formulas
from dagrl.validation.judge import check_judges
from dagrl.validation.model import check_models
from dagrl.validation.nodes import check_nodes
from dagrl.validation.offline import check_offline
from dagrl.validation.own_models import check_own_models
from dagrl.validation.profile import check_profile
from dagrl.validation.rollout import check_rollout
from dagrl.validation.rollout_correction import check_rollout_correction
from dagrl.validation.sleeping import check_sleeping
from dagrl.validation.staleness import check_staleness
from dagrl.validation.tokenizer_use import check_tokenizer_use
from dagrl.validation.trackers import check_trackers
from dagrl.validation.turns import check_turns
from dagrl.validation.validation import check_validation
from dagrl.validation.without_effect import warn_of_no_effect


@dataclass(frozen=True, slots=True)
class CheckedPipeline:
    """A pipeline that nothing is known to be wrong with."""

    loaded: LoadedPipeline
    graph: Graph
    rows: dict[str, int]
    """Rows of the data files, by their keys under ``data``: ``train``, ``val``, ``val.NAME``."""
    warnings: tuple[Problem, ...]
    """What is odd, but does not hinder a run."""


def check_file(path: Path | str, overrides: Sequence[str] = (), *, with_files: bool = True) -> CheckedPipeline:
    """Load a pipeline file and check all that can be checked without its engines. PipelineError with all problems.

    Without its files, neither data nor weights and tokenizer need be there: a run can be planned on another machine.
    """
    loaded = load_pipeline(path, overrides)
    with isolated_imports():
        return _checked(loaded, Findings(loaded.positions), with_files=with_files)


def _checked(loaded: LoadedPipeline, findings: Findings, *, with_files: bool) -> CheckedPipeline:
    pipeline = loaded.pipeline
    # The graph first: it reads a mistake in a node as a reason to be silent about missing columns.
    graph = infer_graph(pipeline, loaded.folder, findings)
    sizes = check_models(pipeline, findings, with_files=with_files)
    check_own_models(pipeline, findings)
    rows = check_data_files(pipeline, graph, loaded.folder, findings) if with_files else {}
    if with_files:
        check_tokenizer_use(pipeline, findings)
    check_engines(pipeline, findings)
    check_engine_options(pipeline, findings)
    check_sleeping(pipeline, findings)
    for name, engine in pipeline.engines.items():
        backend_of(engine).validate(EngineCheck(pipeline, name, engine, sizes[name], findings))
    check_nodes(pipeline, loaded.folder, sizes, findings)
    check_judges(pipeline, loaded.folder, sizes, findings)
    check_critic(pipeline, graph, findings)
    check_formulas(pipeline, graph, loaded.folder, findings)
    check_rollout(pipeline, graph, findings)
    check_filter(pipeline, graph, findings)
    check_turns(pipeline, graph, loaded.folder, findings)
    check_rollout_correction(pipeline, graph, findings)
    check_batches(pipeline, graph, sizes, findings)
    check_staleness(pipeline, graph, findings)
    check_offline(pipeline, findings)
    check_validation(pipeline, graph, loaded.folder, findings)
    check_trackers(pipeline, findings)
    check_profile(pipeline, findings)
    warn_of_no_effect(pipeline, findings)
    findings.raise_if_any()
    assert graph is not None
    return CheckedPipeline(loaded, graph, rows, tuple(sorted(set(findings.warnings))))
