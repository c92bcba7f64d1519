"""Update: which mini-batches reach the engine, with which objective, and how old their samples are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dagrl.algorithms.objective import PolicyObjective
from dagrl.data.batch import Batch
from dagrl.data.stats import Stat
from dagrl.nodes.base import Part
from dagrl.nodes.update import update


class Trainer:
    """Notes what it is told to train on; each call is a new version of the policy."""

    policy_version = 7

    def update(
        self, mini_batches: Sequence[Batch], objective: PolicyObjective, *, tokens_per_micro_batch: int
    ) -> dict[str, Stat]:
        self.trained_on = [batch.rows.tolist() for batch in mini_batches]
        self.objective, self.tokens_per_micro_batch = objective, tokens_per_micro_batch
        self.policy_version += 1
        return {"grad_norm": Stat.of([0.25])}


@pytest.fixture
def parts(bench) -> list[Part]:
    """Three mini-batches, the second without rows on this rank."""
    return [
        Part(0, bench.batch([0, 3], policy_version=[7, 6], advantage=[[1], [1]])),
        Part(1, bench.batch([], policy_version=[], advantage=[])),
        Part(2, bench.batch([5], policy_version=[4], advantage=[[1]])),
    ]


def node(**options) -> dict:
    return {"update": {"op": "update", "engine": "actor", **options}}


def test_mini_batches_are_taken_in_order_once_an_epoch(bench, parts) -> None:
    engine = Trainer()
    (output,) = update(parts, bench.context("update", engine=engine, nodes=node(epochs=2, tokens_per_micro_batch=77)))
    assert engine.trained_on == [[0, 3], [], [5], [0, 3], [], [5]]
    assert engine.tokens_per_micro_batch == 77
    assert (output.shards, output.rows.tolist(), output.columns) == ((), [0, 3, 5], {})
    assert output.stats["grad_norm"].mean == 0.25


def test_staleness_counts_from_the_weights_that_the_update_began_with(bench, parts) -> None:
    (output,) = update(parts, bench.context("update", engine=Trainer(), nodes=node(epochs=2)))
    staleness = output.stats["staleness"]
    assert (staleness.low, staleness.high, staleness.total, staleness.count) == (0, 3, 4, 3)


def test_the_objective_uses_the_nodes_loss_the_rollouts_temperature_and_what_columns_there_are(bench) -> None:
    batch = bench.batch([0], policy_version=[7], advantage=[[1]], old_logprob=[[-1]])
    sampling = {"max_new_tokens": 3, "temperature": 0.6}
    nodes = {"rollout": {"op": "rollout", "engine": "generator", "sampling": sampling}}
    nodes |= node(loss={"clip_ratio": 0.1, "aggregation": "seq-mean-token-sum-norm"})
    engine = Trainer()
    list(update([Part(0, batch)], bench.context("update", engine=engine, nodes=nodes)))
    assert engine.objective.loss.clip_ratio == 0.1
    assert engine.objective.temperature == 0.6
    assert engine.objective.longest_response == 3
    assert engine.objective.columns == ("advantage", "old_logprob")


@pytest.mark.parametrize("read", [{}, {"old_logprob": "rollout_logprob"}])
def test_corrections_reach_the_objective_and_whose_log_probs_the_old_ones_are(bench, read) -> None:
    logprobs = {"old_logprob": [[-1]], "rollout_logprob": [[-1]]}
    batch = bench.batch([0], policy_version=[7], advantage=[[1]], **logprobs)
    engine = Trainer()
    nodes = node(rollout_correction={"rollout_is": "token"}, read=read)
    list(update([Part(0, batch)], bench.context("update", engine=engine, nodes=nodes)))
    assert engine.objective.correction.rollout_is == "token"
    assert engine.objective.old_is_rollout == bool(read)
    assert engine.objective.columns == ("advantage", "old_logprob", "rollout_logprob")


def test_a_rank_without_any_rows_takes_part(bench) -> None:
    engine = Trainer()
    empty = bench.batch([], policy_version=[], advantage=[])
    (output,) = update([Part(0, empty)], bench.context("update", engine=engine))
    assert engine.trained_on == [[]]
    assert output.stats["staleness"].count == 0
