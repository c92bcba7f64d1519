"""Summarizes a checked pipeline for `dagrl validate`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from dagrl.config.errors import counted
from dagrl.config.schema import EngineSpec, GroupSpec, ModelSpec, Pipeline, SourceSpec, TokenizerSpec
from dagrl.graph.dag import Graph
from dagrl.graph.drawing.draw import executor_of
from dagrl.tables import HEADING, render, table
from dagrl.validation import CheckedPipeline


def summarize(checked: CheckedPipeline) -> str:
    """Name, model, data, groups, engines with their layouts, nodes in order, and warnings."""
    pipeline = checked.loaded.pipeline
    sources = pipeline.data.by_key
    step = pipeline.data.prompts_per_step
    repeats = f"; a step takes {step}, so some come more than once"
    data = [
        (key, _source(sources[key]), f"({counted(rows, 'prompt')}{repeats if key == 'train' and rows < step else ''})")
        for key, rows in checked.rows.items()
    ]
    parts: list[RenderableType] = [f"{checked.loaded.path}: {pipeline.name} is valid"]
    for title, content in (
        ("model", [f"  {_model(pipeline.model)}"]),
        ("data", [*([_table(data)] if data else []), f"  {counted(step, 'prompt')} a step, {_length(pipeline)}"]),
        ("groups", [_table((name, _group(group)) for name, group in pipeline.groups.items())]),
        ("engines", [_table(_engines(pipeline))]),
        ("nodes", [_table(_nodes(checked.graph))]),
        ("schedule", [f"  {line}" for line in _schedule(pipeline)]),
        ("warnings", [f"  {warning}" for warning in checked.warnings]),
    ):
        if content:
            parts += ["", Text(title, HEADING), *content]
    return render(parts)


def _length(pipeline: Pipeline) -> str:
    run, steps = pipeline.run, counted(pipeline.run.steps, "step")
    return steps if run.epochs is None else f"{run.epochs:g} epoch{'' if run.epochs == 1 else 's'}, up to {steps}"


def as_values(checked: CheckedPipeline) -> dict[str, object]:
    """The summary for programs: plain values."""
    pipeline = checked.loaded.pipeline
    return {
        "file": str(checked.loaded.path),
        "valid": True,
        "pipeline": pipeline.name,
        "steps": pipeline.run.steps,
        "prompts_per_step": pipeline.data.prompts_per_step,
        "data": {key: {"path": pipeline.data.by_key[key].title, "prompts": rows} for key, rows in checked.rows.items()},
        "groups": {
            name: {"nodes": group.nodes, "gpus_per_node": group.gpus_per_node, "cpus_per_node": group.cpus_per_node}
            for name, group in pipeline.groups.items()
        },
        "engines": {
            name: {
                "backend": engine.backend,
                "group": engine.group or pipeline.engines[str(engine.frozen_copy_of)].group,
            }
            for name, engine in _with_ranks(pipeline).items()
        },
        "nodes": {
            name: {"op": getattr(node.spec, "op", ""), "executor": executor_of(node)}
            for name, node in checked.graph.nodes.items()
            if node.spec is not None
        },
        "warnings": [warning.as_values() for warning in checked.warnings],
        "problems": [],
    }


def _table(rows: Iterable[tuple[str, ...]]) -> RenderableType:
    return table(rows, left=range(3))


def _schedule(pipeline: Pipeline) -> Iterable[str]:
    """A description of how steps overlap; empty if they do not."""
    schedule, moment = pipeline.schedule, "between rollouts"
    if schedule.max_staleness:
        moment = "during rollouts" if schedule.in_flight_weight_update else moment
        versions = counted(schedule.max_staleness, "version")
        yield f"samples up to {versions} behind the weights that train on them; new weights arrive {moment}"
    if schedule.stream_update:
        yield "updates start with the first mini-batch that is ready"


def _source(spec: SourceSpec) -> str:
    first, *others = spec.paths or (None,)
    return spec.title if first is None else f"{_path(first)}{f' and {len(others)} more' if others else ''}"


def _path(path: Path) -> str:
    """The path, relative to the working directory if it is below that."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _model(model: ModelSpec) -> str:
    if model.hub is not None:
        text = model.hub
    elif model.path is not None:
        text = _path(model.path)
    else:
        assert model.init is not None
        sizes = [f"{key} {model.init[key]}" for key in ("hidden_size", "num_hidden_layers") if key in model.init]
        text = f"{model.init['model_type']} with random weights" + (f" ({', '.join(sizes)})" if sizes else "")
    if isinstance(model.tokenizer, TokenizerSpec):
        return f"{text}, a tokenizer of {model.tokenizer.kind}"
    return f"{text}, tokenizer {_path(model.tokenizer)}" if model.tokenizer else text


def _group(group: GroupSpec) -> str:
    slots = counted(group.cpus_per_node, "CPU slot") if group.is_cpu else counted(group.gpus_per_node, "GPU")
    return slots if group.nodes == 1 else f"{group.nodes} nodes with {slots} each"


def _with_ranks(pipeline: Pipeline) -> dict[str, EngineSpec]:
    """The engines, without those of another part of the pipeline."""
    return {name: engine for name, engine in pipeline.engines.items() if engine.group or engine.frozen_copy_of}


def _engines(pipeline: Pipeline) -> Iterable[tuple[str, ...]]:
    for name, engine in _with_ranks(pipeline).items():
        if engine.frozen_copy_of is not None:
            kind = "start weights" if engine.moving_average is None else "moving average"
            yield name, engine.backend, f"{kind} of {engine.frozen_copy_of}, on its ranks"
            continue
        parts = [
            layout_in_words(pipeline, name),
            f"{engine.head} head" if engine.head != "lm" else "",
            f"weights from {engine.weights_from}" if engine.weights_from else "",
            f"its own model {_model(engine.model)}" if engine.model else "",
            "sleeps while other engines run there" if pipeline.sleeps(name) else "",
        ]
        yield name, engine.backend, f"on {engine.group}: {', '.join(filter(None, parts))}"


def layout_in_words(pipeline: Pipeline, name: str) -> str:
    """The layout of an engine on its group: ``tp 2 + sp, pp 4, dp 1``, ``4 servers of 2 GPUs``."""
    engine = pipeline.engines[name]
    assert engine.group is not None, f"{name} has the ranks of another engine"
    return engine.layout_text(pipeline.groups[engine.group])


def _nodes(graph: Graph) -> Iterable[tuple[str, ...]]:
    read = {(wire.node, wire.column) for node in graph.nodes.values() for wire in node.inputs.values()}
    for name, node in graph.nodes.items():
        if node.spec is None:
            continue
        reads = ", ".join(
            column if column == wire.column else f"{column} = {wire.node}.{wire.column}"
            for column, wire in node.inputs.items()
        )
        # Generators write this column only if a node reads it.
        written = (to for column, to in node.outputs.items() if column != "routed_experts" or (name, to) in read)
        writes = ", ".join(written) or ("the selected groups" if name == graph.filter else "nothing")
        if name in graph.skipped:
            writes += f"  (skipped: {graph.skipped[name]})"
        elif name in graph.validates_only:
            writes += "  (in validation only: nothing is trained on it)"
        yield name, f"{getattr(node.spec, 'op', '')} on {executor_of(node)}", f"{reads} -> {writes}"
