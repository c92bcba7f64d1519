"""Log-probs: of which weights, at which temperature."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dagrl.data.batch import Batch, Column
from dagrl.ops.base import OpInput
from dagrl.ops.logprob import logprob


class Scorer:
    """Gives each response token the log-prob -1, or -9 under the start weights and -5 under their average."""

    def __init__(self) -> None:
        self.value = -1.0
        self.asked: list[tuple[float, int]] = []

    @contextmanager
    def start_weights(self) -> Iterator[None]:
        self.value = -9.0
        yield
        self.value = -1.0

    @contextmanager
    def average_weights(self) -> Iterator[None]:
        self.value = -5.0
        yield
        self.value = -1.0

    def logprobs(self, batch: Batch, *, temperature: float, tokens_per_micro_batch: int) -> Column:
        self.asked.append((temperature, tokens_per_micro_batch))
        return Column.ragged([[self.value] * length for length in batch["response_tokens"].lengths], "float32")


@pytest.fixture
def parts(bench) -> list[OpInput]:
    return [
        OpInput(1, bench.batch([2, 3], prompt_tokens=["1+1=", "1="], response_tokens=["2", "345"])),
        OpInput(4, bench.batch([], prompt_tokens=[], response_tokens=[])),
    ]


def test_each_shard_gets_its_log_probs(bench, parts) -> None:
    first, empty = logprob(parts, bench.context("old", engine=Scorer()))
    assert (first.shards, first.rows.tolist()) == ((1,), [2, 3])
    assert first.columns["logprob"].lengths.tolist() == [1, 3]
    assert (empty.shards, len(empty.columns["logprob"])) == ((4,), 0)


@pytest.mark.parametrize(("work", "value"), [({}, -1.0), ({"frozen": True}, -9.0), ({"averaged": True}, -5.0)])
def test_only_a_copy_computes_with_other_weights(bench, parts, work: dict[str, bool], value: float) -> None:
    engine = Scorer()
    first, _ = logprob(parts, bench.context("old", engine=engine, **work))
    assert set(first.columns["logprob"].values.tolist()) == {value}
    assert engine.value == -1.0, "the current weights must be back afterwards"


def test_rows_of_a_source_have_its_temperature(bench) -> None:
    seen: list[Batch] = []

    class Noting(Scorer):
        def logprobs(self, batch: Batch, *, temperature: float, tokens_per_micro_batch: int) -> Column:
            seen.append(batch)
            return super().logprobs(batch, temperature=temperature, tokens_per_micro_batch=tokens_per_micro_batch)

    batch = bench.batch([0, 1, 2], prompt_tokens=["1="] * 3, response_tokens=["2", "3", "4"])
    batch = batch.with_columns({"data_set": Column.text(["greedy", "hot", "usual"])})
    samplings = {"greedy": 0.0, "hot": 1.5}
    train: dict = {
        name: {"path": "a.parquet", "sampling": {"max_new_tokens": 3, "temperature": each}}
        for name, each in samplings.items()
    }
    nodes = {
        "rollout": {"op": "rollout", "engine": "generator", "sampling": {"max_new_tokens": 3, "temperature": 0.5}},
        "old": {"op": "logprob", "engine": "actor"},
    }
    context = bench.context("old", engine=Noting(), nodes=nodes, data={"train": train | {"usual": "b.parquet"}})
    list(logprob([OpInput(0, batch)], context))
    # Greedy samples are scored at 1.
    assert seen[0]["temperature"].values.tolist() == [1.0, 1.5, 0.5]


@pytest.mark.parametrize(("sampled_at", "scored_at"), [(0.7, 0.7), (0.0, 1.0)])
def test_logits_are_divided_by_the_temperature_of_the_samples(
    bench, parts, sampled_at: float, scored_at: float
) -> None:
    engine = Scorer()
    sampling = {"max_new_tokens": 3, "temperature": sampled_at}
    nodes = {
        "rollout": {"op": "rollout", "engine": "generator", "sampling": sampling},
        "old": {"op": "logprob", "engine": "actor", "tokens_per_micro_batch": 99},
    }
    list(logprob(parts, bench.context("old", engine=engine, nodes=nodes)))
    assert engine.asked == [(scored_at, 99)] * 2
