"""Experts among samples: which rows become theirs, and that nothing is compared with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagrl.data.batch import Batch
from dagrl.ops.advantage import advantage
from dagrl.ops.base import OpInput
from dagrl.ops.mix import mix
from dagrl.ops.samples import samples
from dagrl.ops.trajectories import for_all_rows, own_rows


def group_rows(bench, groups: list[list[str]], given: list[list[str]]) -> Batch:
    """Samples of each group, and what its rows have of the data set's responses."""
    said = [text for group in groups for text in group]
    return bench.batch(
        list(range(10, 10 + len(said))),
        group_id=[5 + number for number, group in enumerate(groups) for _ in group],
        response_tokens=said,
        demonstration_tokens=[text for group in given for text in group],
        response_mask=[[0.0] * len(text) for text in said],
        rollout_logprob=[[-2.0] * len(text) for text in said],
        finish_reason=["length"] * len(said),
    )


def mixed(bench, per_prompt: int, *args: Any) -> dict[str, Any]:
    batch = group_rows(bench, *args)
    batch = batch.with_columns({"demonstration": batch["demonstration_tokens"]})
    nodes = {"mix": {"op": "mix", "per_prompt": per_prompt}}
    (output,) = mix([OpInput(3, batch)], bench.context("mix", nodes=nodes))
    assert (output.shards, output.rows.tolist()) == ((3,), batch.rows.tolist())
    assert output.uncounted == ("response_tokens",), "rows are no longer than with the samples, as far as one counts"
    return dict(output.columns)


def test_the_last_of_each_group_becomes_the_experts(bench, texts) -> None:
    columns = mixed(bench, 1, [["1", "22", "3"], ["4", "5"]], [["+", "+", "+"], ["=0", "=0"]])
    assert texts(columns["response_tokens"]) == ["1", "22", "+", "4", "=0"]
    assert columns["is_expert"].values.tolist() == [0, 0, 1, 0, 1]
    assert columns["response_mask"].values.tolist() == [0, 0, 0, 1, 0, 1, 1]
    assert columns["rollout_logprob"].values.tolist() == [-2, -2, -2, 0, -2, 0, 0]
    assert columns["finish_reason"].strings() == ["length", "length", "stop", "length", "stop"]
    for name in ("response_mask", "rollout_logprob"):
        assert columns[name].lengths.tolist() == columns["response_tokens"].lengths.tolist()


def test_several_experts_have_the_data_sets_responses_in_its_order(bench, texts) -> None:
    columns = mixed(bench, 2, [["1", "2", "3", "4", "5"]], [["+", "=", "+", "=", "+"]])
    assert texts(columns["response_tokens"]) == ["1", "2", "3", "+", "="]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo"])
def test_advantages_are_those_of_the_samples_alone(bench, estimator: str) -> None:
    nodes = {"advantage": {"op": "advantage", "estimator": estimator}}
    context = bench.context("advantage", nodes=nodes)
    columns = {
        "group_id": [0, 0, 0, 1, 1, 1],
        "reward": [1.0, 0.0, 7.0, 0.0, 3.0, -9.0],
        "response_mask": [[1, 1], [1], [1, 1, 1], [1], [0, 1], [1]],
    }
    whole = bench.batch(list(range(6)), **columns)
    alone = whole.take(np.array([0, 1, 3, 4]))
    is_expert = bench.batch(list(range(6)), reward=[0, 0, 1, 0, 0, 1])["reward"]
    (output,) = advantage([OpInput(0, whole.with_columns({"is_expert": is_expert}))], context)
    (expected,) = advantage([OpInput(0, alone)], context)
    found = output.columns["advantage"]
    assert found.lengths.tolist() == [2, 1, 3, 1, 2, 1]
    assert [found[row].tolist() for row in (2, 5)] == [[0, 0, 0], [0]]
    assert found.take(np.array([0, 1, 3, 4])).values.tolist() == expected.columns["advantage"].values.tolist()
    assert np.any(expected.columns["advantage"].values != 0)


def test_without_experts_all_rows_are_the_policys_own(bench) -> None:
    batch = bench.batch([0, 1], reward=[1.0, 2.0], response_mask=[[1], [1, 1]])
    assert own_rows(batch) is batch
    columns = {"response_mask": batch["response_mask"]}
    assert for_all_rows(columns, batch, batch) == columns


def test_rewards_and_lengths_of_the_samples_are_reported(bench) -> None:
    batch = bench.batch(
        [0, 1],
        group_id=[0, 0],
        prompt_tokens=["1+1=", "1+1="],
        response_tokens=["2", "345"],
        reward=[0.25, 1.0],
        answer=["2", "2"],
        data_source=["sums", "sums"],
        data_set=["train", "train"],
    )
    batch = batch.with_columns({"is_expert": bench.batch([0, 1], reward=[0, 1])["reward"]})
    (output,) = samples([OpInput(0, batch)], bench.context())
    assert (output.rows.tolist(), output.stats["reward"].mean) == ([0, 1], 0.25)
    assert output.stats["response_tokens"].high == 1
