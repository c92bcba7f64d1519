"""The results of evaluations: figures by source with intervals, prompts, and paired differences between targets.

Prompts are the units of all intervals, because the responses to a prompt depend on each other (Miller 2024, "Adding
Error Bars to Evals", arXiv 2411.00640): they cover the choice of the prompts and the sampling of the responses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import RenderableType

from dagrl.algorithms.at_k import figures_at_k
from dagrl.config.schema import Pipeline
from dagrl.environments.failures import LOST
from dagrl.reporting.run_data.run_reader import read_run
from dagrl.reporting.run_data.sample_view import sample_file
from dagrl.tables import table

Z = 1.959964
"""Half the width of a normal interval that covers 95 %, in standard errors."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """One target's responses to the prompts of a validation set."""

    rows: list[dict[str, Any]]
    """The first sample of each prompt."""
    figures: dict[str, np.ndarray]
    """Figure -> value of each prompt, NaN if too few responses were measured."""
    measured: np.ndarray
    """Responses to each prompt that say something of the policy, int64 [prompts]."""
    samples: pa.Table
    n: int

    def of(self, source: str | None) -> np.ndarray:
        """The prompts of a data source; None for all. Indices."""
        return np.flatnonzero([source is None or row["data_source"] == source for row in self.rows])


def read_prompts(folder: Path, step: int, pipeline: Pipeline) -> dict[str, Prompts]:
    """The prompts of each validation set, from the samples of a run that has validated alone. OSError, ValueError."""
    path = sample_file(folder, step, validation=True)
    if path is None:
        raise FileNotFoundError(f"{folder} holds no samples of step {step}")
    whole = pq.read_table(path)
    sets = {}
    for name, n in pipeline.val_ns.items():
        samples = whole.filter(pc.equal(whole["data_set"], name))
        rewards = samples["reward"].to_numpy().reshape(-1, n)
        lost = np.isin(np.array(samples["finish_reason"].to_pylist()), LOST)
        if "excluded" in samples.column_names:
            lost &= samples["excluded"].to_numpy(zero_copy_only=False)
        measured = ~lost.reshape(-1, n)
        figures = figures_at_k(rewards, measured, None, pipeline.data.val_pass_reward)
        first = samples.take(np.arange(0, len(samples), n))
        rows = first.select(["group_id", "sample_id", "data_source", "prompt", "answer"]).to_pylist()
        sets[name] = Prompts(rows, figures, measured.sum(axis=1), samples, n)
    return sets


def interval(values: np.ndarray, *, is_rate: bool) -> tuple[float, float]:
    """A 95 % interval of the mean of one value for each prompt.

    For rates in 0..1 it is Wilson's (1927), with the number of prompts that would give an independent rate the variance
    of these values: it stays within 0..1, and has a width if all prompts agree. Otherwise mean +- 1.96 standard errors.
    """
    count, mean = len(values), float(values.mean())
    if count < 2:
        return (0.0, 1.0) if is_rate else (-math.inf, math.inf)
    if not is_rate:
        error = Z * float(values.std(ddof=1)) / math.sqrt(count)
        return mean - error, mean + error
    independent, variance = mean * (1 - mean), float(values.var())
    # At 0 and 1, and if all values are equal, the variance says nothing.
    size = count * independent / variance if variance > 1e-12 else count
    center, spread = mean + Z * Z / (2 * size), Z * math.sqrt(independent / size + (Z / (2 * size)) ** 2)
    scale = 1 + Z * Z / size
    # At 0 and 1 the ends are the mean itself, apart from rounding.
    return max(0.0, min(mean, (center - spread) / scale)), min(1.0, max(mean, (center + spread) / scale))


def _figure(name: str, values: np.ndarray) -> dict[str, float]:
    values = values[~np.isnan(values)]
    if not len(values):
        return {"prompts": 0}
    low, high = interval(values, is_rate=name.startswith("pass@"))
    return {"value": float(values.mean()), "low": low, "high": high, "prompts": len(values)}


def results_of(name: str, folder: Path, step: int, sets: Mapping[str, Prompts]) -> dict[str, Any]:
    """The results of a target as plain values: figures of each set and source, and the worst and best prompts."""
    return {
        "name": name,
        "folder": str(folder),
        "step": step,
        "metrics": {name: value for name, value in read_run(folder).by_step[step].items() if name.startswith("val/")},
        "sets": [_of_source(each, None, prompts) for each, prompts in sets.items()]
        + [_of_source(each, source, prompts) for each, prompts in sets.items() for source in _sources(prompts)],
        "prompts": [entry for each, prompts in sets.items() for entry in _prompts(each, prompts)],
    }


def _sources(prompts: Prompts) -> list[str]:
    several = list(dict.fromkeys(row["data_source"] for row in prompts.rows))
    return several if len(several) > 1 else []


def _of_source(name: str, source: str | None, prompts: Prompts) -> dict[str, Any]:
    chosen = prompts.of(source)
    rows = (chosen[:, None] * prompts.n + np.arange(prompts.n)).ravel()
    samples = prompts.samples.take(rows)
    tokens = pc.list_value_length(samples["response_tokens"]).to_numpy()
    ended = Counter(samples["finish_reason"].to_pylist())
    wanted = [figure for figure in prompts.figures if figure.startswith(("mean@", "pass@"))]
    return {
        "set": name,
        "source": source,
        "prompts": len(chosen),
        "n": prompts.n,
        "lost": len(rows) - int(prompts.measured[chosen].sum()),
        "figures": {figure: _figure(figure, prompts.figures[figure][chosen]) for figure in wanted},
        "tokens": {"mean": float(tokens.mean()), "max": int(tokens.max())} if len(tokens) else {},
        "finish_reasons": dict(ended.most_common()),
    }


def _prompts(name: str, prompts: Prompts) -> Iterator[dict[str, Any]]:
    """Each prompt with its mean reward and rate of right responses; without measured responses these are None."""
    means = prompts.figures.get(f"mean@{prompts.n}", np.full(len(prompts.rows), np.nan)).tolist()
    rates = prompts.figures.get("pass@1", np.full(len(prompts.rows), np.nan)).tolist()
    for row, mean, rate in zip(prompts.rows, means, rates, strict=True):
        known = not math.isnan(mean)
        yield {"set": name, **row, "mean": mean if known else None, "pass": rate if known else None}


def compare(first: Mapping[str, Prompts], second: Mapping[str, Prompts]) -> list[dict[str, Any]]:
    """The paired differences of two targets, second minus first, in each set whose prompts both have.

    The same prompts make the interval of a difference narrower than those of the two figures suggest.
    """
    found = []
    for name in first.keys() & second.keys():
        one, other = first[name], second[name]
        if [row["answer"] for row in one.rows] != [row["answer"] for row in other.rows]:
            continue  # A model with another tokenizer may have dropped other prompts.
        figures = {}
        for figure in one.figures.keys() & other.figures.keys():
            difference = other.figures[figure] - one.figures[figure]
            difference = difference[~np.isnan(difference)]
            if figure.startswith(("mean@", "pass@")) and len(difference) > 1:
                low, high = interval(difference, is_rate=False)
                figures[figure] = {"value": float(difference.mean()), "low": low, "high": high}
        changes = other.figures["mean@" + str(other.n)] - one.figures.get(f"mean@{one.n}", np.array(np.nan))
        order = [place for place in np.argsort(changes).tolist() if changes[place]]
        found.append(
            {
                "set": name,
                "figures": dict(sorted(figures.items(), key=lambda item: (item[0][0], len(item[0]), item[0]))),
                "better": [_change(other, place, changes) for place in reversed(order) if changes[place] > 0],
                "worse": [_change(other, place, changes) for place in order if changes[place] < 0],
            }
        )
    return found


def _change(prompts: Prompts, place: int, changes: np.ndarray) -> dict[str, Any]:
    return {**prompts.rows[place], "change": float(changes[place])}


def in_words(results: Sequence[Mapping[str, Any]], comparisons: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """Tables of the results for a terminal."""
    parts: list[RenderableType] = []
    for result in results:
        parts += [result["name"], _table_of(result)]
        parts += [f"  {line}" for line in _remarks(result)]
    for comparison in comparisons:
        parts.append(f"{comparison['second']} minus {comparison['first']}, on the same prompts")
        for each in comparison["sets"]:
            rows = [[each["set"], name, _signed(figure)] for name, figure in each["figures"].items()]
            parts.append(table(rows, headings=("set", "figure", "difference"), left=(0, 1)))
            parts.append(f"  {len(each['better'])} prompts are better, {len(each['worse'])} worse")
    return parts


def _table_of(result: Mapping[str, Any]) -> RenderableType:
    names = list(dict.fromkeys(name for each in result["sets"] for name in each["figures"]))
    rows = [
        [
            each["set"] if each["source"] is None else f"  {each['source']}",
            f"{each['prompts']} x {each['n']}",
            *(_shown(each["figures"].get(name)) for name in names),
            f"{each['tokens'].get('mean', 0):.0f}",
        ]
        for each in result["sets"]
    ]
    return table(rows, headings=("set", "prompts", *names, "tokens"))


def _remarks(result: Mapping[str, Any]) -> Iterator[str]:
    for each in result["sets"]:
        if each["source"] is None:
            reasons = ", ".join(f"{reason} {count}" for reason, count in each["finish_reasons"].items())
            yield f"{each['set']}: ended by {reasons}"
            if each["lost"]:
                yield f"{each['set']}: {each['lost']} responses were lost by failures of machines, and are not counted"


def _shown(figure: Mapping[str, float] | None) -> str:
    if not figure or "value" not in figure:
        return "-"
    return f"{figure['value']:.3f} ({figure['low']:.3f} to {figure['high']:.3f})"


def _signed(figure: Mapping[str, float]) -> str:
    return f"{figure['value']:+.3f} ({figure['low']:+.3f} to {figure['high']:+.3f})"
