"""Finds the first difference of two runs: its step, node, column and row.

Steps that both runs recorded are compared bit by bit, others by metrics.jsonl and samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from dagrl.config.errors import counted
from dagrl.config.loading.yaml_source import read_document
from dagrl.data.column_store import DamagedColumnError, StoredBlock
from dagrl.data.stats import merge
from dagrl.orchestrator.folder.identity import changes
from dagrl.orchestrator.records.files import NodeRecord, RecordError, Records, ranges
from dagrl.orchestrator.replay.compare import Difference, compare_columns, compare_metrics, compare_weights
from dagrl.reporting.run_data.run_reader import open_run, pipeline_of_run
from dagrl.reporting.run_data.sample_view import sample_file

_MEASURED = ("time/", "throughput/", "driver/", "mfu/", "memory/", "sync/", "run/", "agent/seconds")
"""Metrics that differ from run to run."""
_SAMPLED = ("prompt", "answer", "response", "finish_reason", "reward", "advantage", "policy_version")
"""Columns of the samples, in the order of the nodes that write them."""
_WRITTEN_AS = {"response": "response_tokens", "prompt": "prompt_tokens"}
_MOST_METRICS = 4


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference of two runs."""

    step: int
    node: str
    """The node with different results; empty if unknown."""
    differences: tuple[Difference, ...]
    hint: str = ""


@dataclass(frozen=True, slots=True)
class RunDiff:
    """The comparison of two runs."""

    parting: Parting | None
    changed: str
    """Differences of their pipelines."""
    compared: tuple[str, ...]
    """Names of the parts that were compared."""


def diff_runs(left: Path, right: Path) -> RunDiff:
    """Compare two runs. ValueError if they have no common parts."""
    runs = open_run(left), open_run(right)
    records = Records(left), Records(right)
    compared, partings = [], []
    common = sorted(_keys(records[0]) & _keys(records[1]))
    if common:
        compared.append(f"records of {ranges(sorted({step for step, _ in common}))}")
        partings.append(_in_records(records, common))
    metrics = [run.by_step for run in runs]
    steps = sorted(metrics[0].keys() & metrics[1].keys())
    if steps:
        if sampled := [step for step in steps if all(_sample_files((left, right), step))]:
            compared.append(f"samples of {ranges(sampled)}")
        compared.append(f"metrics of {ranges(steps)}")
        partings += [_in_samples((left, right), sampled), _in_metrics(metrics, steps)]
    if not compared:
        raise ValueError(f"{left} and {right} have no steps in common; nothing can be compared")
    # The earliest difference; at the same step the most specific one, which comes first.
    parting = min(filter(None, partings), key=lambda parting: parting.step, default=None)
    trees = [read_document(folder / "pipeline.yaml").tree for folder in (left, right)]
    return RunDiff(parting, changes(*trees), tuple(compared))


def _keys(records: Records) -> set[tuple[int, str]]:
    return {(step, node) for step in records.steps() for node in records.nodes(step)}


# -- records


def _in_records(records: Sequence[Records], common: Iterable[tuple[int, str]]) -> Parting | None:
    by_step: dict[int, list[str]] = {}
    for step, node in common:
        by_step.setdefault(step, []).append(node)
    for step, nodes in by_step.items():
        pairs = [[side.read(step, node) for side in records] for node in nodes]
        # In the order in which they ran.
        for pair in sorted(pairs, key=lambda pair: min((run.inputs.order for run in pair[0].runs), default=0)):
            try:
                if (parting := _of_node(records, pair)) is not None:
                    return parting
            except DamagedColumnError as error:
                raise RecordError(f"the record of {pair[0].node} in step {step} is incomplete: {error}") from error
    return None


def _of_node(records: Sequence[Records], pair: Sequence[NodeRecord]) -> Parting | None:
    step, node = pair[0].step, pair[0].node
    sources = [_sources(record) for record in pair]
    for task in dict.fromkeys((*sources[0], *sources[1])):
        sides = [side.get(task, []) for side in sources]
        if differences := _of_blocks(records, sides):
            return Parting(step, task, tuple(differences), f"`{node}` reads it; `{task}` is not recorded")
    outputs = [[run.outputs for run in record.runs if run.outputs] for record in pair]
    sides = [[stored.block for output in side for stored in output.blocks] for side in outputs]
    differences = _of_blocks(records, sides)
    if differences:
        differences = [
            replace(difference, text=difference.text + _workers(records[1], pair[1], difference))
            for difference in differences
        ]
    if pair[0].trains:
        differences += compare_metrics(*(merge(output.stats() for output in side) for side in outputs))
        weights = [{name: digest for output in side for name, digest in output.weights.items()} for side in outputs]
        if (difference := compare_weights(weights[0], weights[1])) is not None:
            differences.append(difference)
    return Parting(step, node, tuple(differences), "its inputs are equal") if differences else None


def _sources(record: NodeRecord) -> dict[str, list[StoredBlock]]:
    sources: dict[str, list[StoredBlock]] = {}
    for run in record.runs:
        for task, blocks in run.inputs.sources.items():
            sources.setdefault(task, []).extend(block for block in blocks if block not in sources.get(task, []))
    return sources


def _of_blocks(records: Sequence[Records], sides: Sequence[Sequence[StoredBlock]]) -> list[Difference]:
    if list(sides[0]) == list(sides[1]):
        return []
    batches = [side_records.batch(side) for side_records, side in zip(records, sides, strict=True)]
    if batches[0] is None or batches[1] is None:
        return [Difference("columns", "are only in one run", math.inf)] if batches[0] is not batches[1] else []
    both = np.intersect1d(batches[0].rows, batches[1].rows)
    if differing := compare_columns(batches[0].in_order(both), batches[1].in_order(both)):
        return differing
    alone = np.setxor1d(batches[0].rows, batches[1].rows)
    if len(alone):
        are = "is" if len(alone) == 1 else "are"
        text = f"{counted(len(alone), 'row')} {are} only in one run, the first is row {alone[0]}"
        return [Difference("rows", text, math.inf, tuple(alone.tolist()))]
    return []


def _workers(records: Records, record: NodeRecord, difference: Difference) -> str:
    """Description of the second run's workers that returned the differing rows, if there are several workers."""
    differing: list[str] = []
    others: list[str] = []
    for stored in (stored for run in record.runs if run.outputs for stored in run.outputs.blocks):
        differs = np.isin(records.columns.get(stored.block.rows).values, difference.rows).any()
        (differing if differs else others).append(stored.worker)
    alone = sorted(set(differing) - set(others))
    return (
        f"; all of them are from {', '.join(alone)}" if others and alone and len(alone) == len(set(differing)) else ""
    )


# -- without records


def _sample_files(folders: Sequence[Path], step: int) -> list[Path | None]:
    return [sample_file(folder, step) for folder in folders]


def _in_samples(folders: Sequence[Path], steps: Iterable[int]) -> Parting | None:
    for step in steps:
        tables = [pq.read_table(file).to_pydict() for file in _sample_files(folders, step)]
        ids = [table["sample_id"] for table in tables]
        places = [{row: place for place, row in enumerate(numbers)} for numbers in ids]
        both = [row for row in ids[0] if row in places[1]]
        for name in _SAMPLED:
            if all(name in table for table in tables):
                values = [
                    [table[name][place[row]] for row in both] for table, place in zip(tables, places, strict=True)
                ]
                if difference := _of_values(name, both, *values):
                    return Parting(step, _writer(folders[0], name), (difference,), "among the samples of the step")
    return None


def _of_values(name: str, rows: Sequence[int], left: Sequence[Any], right: Sequence[Any]) -> Difference | None:
    differing = [place for place in range(len(rows)) if left[place] != right[place] and left[place] == left[place]]
    if not differing:
        return None
    first = differing[0]
    text = f"{len(differing)} of {len(rows)} rows differ; row {rows[first]}: {left[first]!r} and {right[first]!r}"
    return Difference(f"column {name}", text, math.inf, tuple(rows[place] for place in differing))


def _writer(folder: Path, column: str) -> str:
    """The node that writes a column of the samples; empty if it comes from the data or is unknown."""
    try:
        graph = pipeline_of_run(folder).graph
    except ValueError:
        return ""
    wanted = _WRITTEN_AS.get(column, column)
    nodes = [node.name for node in graph.training.nodes.values() if wanted in node.outputs.values() and node.spec]
    return nodes[0] if nodes else ""


def _in_metrics(metrics: Sequence[Mapping[int, Mapping[str, float]]], steps: Iterable[int]) -> Parting | None:
    for step in steps:
        lines = [line_of[step] for line_of in metrics]
        names = [name for name in dict.fromkeys((*lines[0], *lines[1])) if not name.startswith(_MEASURED)]
        differing = [name for name in names if lines[0].get(name) != lines[1].get(name)]
        if differing:
            differences = [
                Difference(f"metric {name}", f"{lines[0].get(name)} and {lines[1].get(name)}", math.inf)
                for name in differing[:_MOST_METRICS]
            ]
            more = len(differing) - len(differences)
            hint = f"and {more} more metrics; " if more else ""
            return Parting(step, "", tuple(differences), f"{hint}record nodes (run.record) to see which column and row")
    return None


def lines_of(left: Path, right: Path, result: RunDiff) -> Iterator[str]:
    if result.changed:
        yield f"the pipelines differ: {result.changed}"
    if result.parting is None:
        yield f"{left} and {right} are equal; compared: {', '.join(result.compared)}"
        return
    parting = result.parting
    yield f"{left} and {right} part in step {parting.step}" + (f", at node {parting.node}" if parting.node else "")
    for difference in parting.differences:
        yield f"  {difference.what}: {difference.text}"
    if parting.hint:
        yield f"  {parting.hint}"


def as_dict(result: RunDiff) -> dict[str, object]:
    """Return the comparison for JSON: `equal`, `parting`, `pipelines` and `compared`."""
    parting = result.parting
    return {
        "equal": parting is None,
        "parting": parting and asdict(parting) | {"node": parting.node or None},
        "pipelines": result.changed,
        "compared": result.compared,
    }
