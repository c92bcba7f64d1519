"""Update: which mini-batches reach the engine, with which objective, and how old their samples are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from work import changed

from dagrl.algorithms.objective import PolicyObjective
from dagrl.algorithms.sft import MixedObjective, ObservedObjective
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.ops.base import OpInput
from dagrl.ops.update import update


class Trainer:
    """Notes what it is told to train on; each call is a new version of the policy."""

    policy_version = 7

    def update(
        self,
        mini_batches: Sequence[Batch],
        objective: PolicyObjective,
        *,
        tokens_per_micro_batch: int,
        begins: bool = True,
        ends: bool = True,
    ) -> dict[str, Stat]:
        self.batches = mini_batches
        self.trained_on = [batch.rows.tolist() for batch in mini_batches]
        self.masks = [batch["response_mask"].values.tolist() for batch in mini_batches if "response_mask" in batch]
        self.objective, self.tokens_per_micro_batch = objective, tokens_per_micro_batch
        self.part = (begins, ends)
        self.policy_version += ends
        return {"grad_norm": Stat.of([0.25])}


@pytest.fixture
def parts(bench) -> list[OpInput]:
    """Three mini-batches, the second without rows on this rank."""
    return [
        OpInput(0, bench.batch([0, 3], policy_version=[7, 6], advantage=[[1], [1]], response_mask=[[1], [1]])),
        OpInput(1, bench.batch([], policy_version=[], advantage=[], response_mask=[])),
        OpInput(2, bench.batch([5], policy_version=[4], advantage=[[1]], response_mask=[[1]])),
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
    list(update([OpInput(0, batch)], bench.context("update", engine=engine, nodes=nodes)))
    assert engine.objective.loss.clip_ratio == 0.1
    assert engine.objective.temperature == 0.6
    assert engine.objective.longest_response == 3
    assert engine.objective.columns == ("advantage", "old_logprob")


def test_rows_of_sources_have_their_temperature_and_the_number_of_their_source(bench) -> None:
    batch = bench.batch([0, 1, 2], policy_version=[7] * 3, advantage=[[1]] * 3)
    batch = batch.with_columns({"data_set": Column.text(["code", "sums", "gone"])})
    sampling = {"max_new_tokens": 3, "temperature": 0.6}
    own = {"temperature": 1.2, "max_new_tokens": 7}
    nodes = {"rollout": {"op": "rollout", "engine": "generator", "sampling": sampling}}
    nodes |= node(loss={"aggregation": "seq-mean-token-sum-norm"})
    engine = Trainer()
    data = {"train": {"sums": "a.parquet", "code": {"path": "b.parquet", "sampling": own}}}
    list(update([OpInput(0, batch)], bench.context("update", engine=engine, nodes=nodes, data=data)))
    (seen,) = engine.batches
    assert seen["temperature"].values.tolist() == np.float32([1.2, 0.6, 0.6]).tolist()
    assert seen["source"].values.tolist() == [1, 0, -1]
    assert engine.objective.sources == ("train/sums/", "train/code/")
    assert (engine.objective.temperature, engine.objective.longest_response) == (0.6, 7)


@pytest.mark.parametrize("read", [{}, {"old_logprob": "rollout_logprob"}])
def test_corrections_reach_the_objective_and_whose_log_probs_the_old_ones_are(bench, read) -> None:
    logprobs = {"old_logprob": [[-1]], "rollout_logprob": [[-1]]}
    batch = bench.batch([0], policy_version=[7], advantage=[[1]], **logprobs)
    engine = Trainer()
    nodes = node(rollout_correction={"rollout_is": "token"}, read=read)
    list(update([OpInput(0, batch)], bench.context("update", engine=engine, nodes=nodes)))
    assert engine.objective.correction.rollout_is == "token"
    assert engine.objective.old_is_rollout == bool(read)
    assert engine.objective.columns == ("advantage", "old_logprob", "rollout_logprob")


def test_an_experts_rows_are_no_samples_of_the_policy_whatever_their_weight(bench) -> None:
    columns = {"policy_version": [7], "advantage": [[1]], "response_mask": [[1]], "is_expert": [[1]]}
    for coef in (0.0, 0.25):
        engine = Trainer()
        context = bench.context("update", engine=engine, nodes=node(loss={"sft_coef": coef}))
        list(update([OpInput(0, bench.batch([0], **columns))], context))
        assert isinstance(engine.objective, MixedObjective) and engine.objective.mu == coef


def test_answers_of_tools_are_learned_beside_the_policys_loss(bench) -> None:
    columns = {"policy_version": [7], "advantage": [[1, 0]], "response_mask": [[1, 0]], "token_turn": [[1, 0]]}
    for coef in (0.0, 0.1):
        engine = Trainer()
        context = bench.context("update", engine=engine, nodes=node(loss={"observation_coef": coef}))
        list(update([OpInput(0, bench.batch([0], **columns))], context))
        assert isinstance(engine.objective, ObservedObjective) == bool(coef)
    assert engine.objective.factors == (1.0, 0.1) and "token_turn" in engine.objective.columns


def test_a_rank_without_any_rows_takes_part(bench) -> None:
    engine = Trainer()
    empty = bench.batch([], policy_version=[], advantage=[])
    (output,) = update([OpInput(0, empty)], bench.context("update", engine=engine))
    assert engine.trained_on == [[]]
    assert output.stats["staleness"].count == 0


def test_an_engine_receives_the_part_of_a_step_that_it_trains_on(bench) -> None:
    batch = bench.batch([0], policy_version=[7], advantage=[[1]])
    engine = Trainer()
    context = bench.context("update", engine=engine)
    for begins, ends in ((True, False), (False, False), (False, True)):
        (output,) = update([OpInput(0, batch)], changed(context, begins=begins, ends=ends))
        assert engine.part == (begins, ends)
        assert output.stats["staleness"].high == 0, "the version moves with the last part"
    assert engine.policy_version == 8


@pytest.fixture
def aged() -> Callable[[Any], OpInput]:
    """Samples that are 0, 1 and 2 versions behind, of 2, 1 and 2 tokens."""
    masks = [[1, 1], [1], [0, 1]]
    return lambda bench: OpInput(
        0, bench.batch([0, 3, 5], policy_version=[7, 6, 5], advantage=masks, response_mask=masks)
    )


@pytest.mark.parametrize("choice", ["auto", "mask"])
def test_samples_too_old_are_masked_and_counted(bench, aged, choice) -> None:
    engine = Trainer()
    schedule = {"max_staleness": 1, "stale_samples": choice}
    (output,) = update([aged(bench)], bench.context("update", engine=engine, schedule=schedule))
    assert engine.trained_on == [[0, 3, 5]]
    assert engine.masks == [[1, 1, 1, 0, 0]]
    assert output.stats["staleness/masked"].total == 1
    assert (output.stats["staleness"].high, output.stats["staleness"].mean) == (2, 1)


def test_samples_too_old_are_dropped_and_counted(bench, aged) -> None:
    engine = Trainer()
    schedule = {"max_staleness": 0, "stale_samples": "drop"}
    (output,) = update([aged(bench)], bench.context("update", engine=engine, schedule=schedule))
    assert engine.trained_on == [[0]]
    assert {name: count.tolist() for name, count in output.counts.items()} == {
        "stale": [0, 1, 1],
        "kept": [2, 0, 0],
    }
    assert output.rows.tolist() == [0, 3, 5]


def test_a_sample_too_old_can_end_the_run(bench, aged) -> None:
    context = bench.context("update", engine=Trainer(), schedule={"max_staleness": 1, "stale_samples": "stop"})
    with pytest.raises(ValueError, match=r"sample 5 was sampled by policy version 5, 2 behind .*max_staleness is 1; "):
        list(update([aged(bench)], context))
    engine, schedule = Trainer(), {"max_staleness": 2, "stale_samples": "stop"}
    list(update([aged(bench)], bench.context("update", engine=engine, schedule=schedule)))
    assert engine.trained_on == [[0, 3, 5]], "none is too old"


def test_partial_rollouts_have_their_own_staleness_bound(bench, aged) -> None:
    rollout = {"op": "rollout", "engine": "generator", "sampling": {"max_new_tokens": 3}, "partial_rollout": True}
    for most, masked in ((2, 0), (1, 1)):
        nodes = {"rollout": rollout | {"partial_rollout_max_age": most}}
        (output,) = update([aged(bench)], bench.context("update", engine=Trainer(), nodes=nodes))
        assert output.stats["staleness/masked"].total == masked
    strict = {"stale_samples": "mask"}
    (output,) = update([aged(bench)], bench.context("update", engine=Trainer(), nodes=nodes, schedule=strict))
    assert output.stats["staleness/masked"].total == 2


def test_only_the_tokens_that_are_too_old_are_masked_where_their_versions_are_known(bench) -> None:
    versions, masks = [[5, 5, -1, 7], [7, 7]], [[1, 1, 0, 1], [1, 1]]
    batch = bench.batch([0, 1], policy_version=[5, 7], advantage=masks, response_mask=masks)
    known = batch.with_columns({"token_version": Column.ragged(versions, "int32")})
    engine = Trainer()
    schedule = {"max_staleness": 1}
    (output,) = update([OpInput(0, known)], bench.context("update", engine=engine, schedule=schedule))
    assert engine.masks == [[0, 0, 0, 1, 1, 1]]
    assert output.stats["staleness/masked"].total == 1
    assert {name: count.tolist() for name, count in output.counts.items()} == {"stale": [2, 0], "kept": [1, 2]}
    tokens = output.stats["staleness/tokens"]
    assert (tokens.count, tokens.mean, tokens.high) == (5, 0.8, 2)
    list(update([OpInput(0, batch)], bench.context("update", engine=engine, schedule=schedule)))
    assert engine.masks == [[0, 0, 0, 0, 1, 1]], "without them, whole samples are"


@pytest.mark.parametrize("choice", ["auto", "mask", "drop", "stop"])
@pytest.mark.parametrize("by_token", [False, True])
def test_samples_that_a_buffer_returns_are_not_stale(bench, aged, choice, by_token) -> None:
    batch = aged(bench).batch.with_columns({"is_replayed": Column(np.array([0, 1, 1], np.float32))})
    if by_token:
        versions = Column.ragged([[7, 7], [6], [4, 5]], "int32")
        batch = batch.with_columns({"token_version": versions})
    engine = Trainer()
    context = bench.context("update", engine=engine, schedule={"max_staleness": 0, "stale_samples": choice})
    (output,) = update([OpInput(0, batch)], context)
    assert engine.trained_on == [[0, 3, 5]]
    assert engine.masks == [[1, 1, 1, 0, 1]]
    assert (output.stats["staleness"].count, output.stats["staleness"].high) == (1, 0)
    assert ("staleness/tokens" in output.stats) == by_token


def test_a_generator_that_never_changes_has_no_age(bench, aged) -> None:
    generator = {"generator": {"backend": "hf", "group": "rollout"}}
    engine = Trainer()
    (output,) = update([aged(bench)], bench.context("update", engine=engine, engines=generator))
    assert engine.masks == [[1, 1, 1, 0, 1]]
    assert "staleness/masked" not in output.stats
