"""Reward models: tokens to a head, text to a classifier."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dagrl.backends.base import Conversation, ModelScores
from dagrl.data.batch import Batch, Column
from dagrl.ops.base import OpInput
from dagrl.ops.reward_model import reward_model


class Head:
    """ModelScores a row by its tokens."""

    def values(self, batch: Batch, *, tokens_per_micro_batch: int) -> Column:
        self.tokens_per_micro_batch = tokens_per_micro_batch
        lengths = batch["prompt_tokens"].lengths + batch["response_tokens"].lengths
        return Column(lengths.astype(np.float32))


class Classifier:
    """ModelScores a conversation by its words."""

    def scores(self, conversations: Sequence[Conversation], *, tokens_per_micro_batch: int) -> ModelScores:
        self.conversations = conversations
        found = [len(conversation[-1]["content"]) for conversation in conversations]
        return ModelScores(np.array(found, np.float32), np.array(found) > 2)


def node(**options: Any) -> dict[str, Any]:
    return {"reward": {"op": "reward_model", "engine": "judge", "tokens_per_micro_batch": 40, **options}}


def engines(backend: str) -> dict[str, Any]:
    return {"judge": {"backend": backend, "group": "rollout", "head": "reward"}}


def test_a_head_reads_the_sampled_tokens(bench) -> None:
    part = OpInput(1, bench.batch([2, 3], prompt_tokens=["1+1=", "1="], response_tokens=["2", "345"]))
    head = Head()
    context = bench.context("reward", engine=head, engines=engines("megatron"), nodes=node(write="score"))
    (output,) = reward_model([part], context)
    assert (output.shards, output.rows.tolist()) == ((1,), [2, 3])
    assert output.columns["reward"].values.tolist() == [5, 5]
    assert output.stats["reward/score"].mean == 5
    assert head.tokens_per_micro_batch == 40


@pytest.fixture
def prompt() -> str:
    return json.dumps([{"role": "system", "content": "Count."}, {"role": "user", "content": "1+1="}])


def test_a_classifier_reads_messages_without_the_token_that_ended_the_response(bench, prompt) -> None:
    end = bench.tokenizer.eos_token_id
    said = [[*bench.tokenizer.encode("2"), end], bench.tokenizer.encode("345")]
    batch = bench.batch([2, 3], response_tokens=said).with_columns({"messages": Column.text([prompt, prompt])})
    classifier = Classifier()
    context = bench.context("reward", engine=classifier, engines=engines("hf"), nodes=node())
    (output,) = reward_model([OpInput(0, batch)], context)
    assert classifier.conversations == [
        [*json.loads(prompt), {"role": "assistant", "content": "2"}],
        [*json.loads(prompt), {"role": "assistant", "content": "345"}],
    ]
    assert output.columns["reward"].values.tolist() == [1, 3]
    assert output.columns["reward"].values.dtype == np.float32
    assert {name: stat.mean for name, stat in output.stats.items()} == {"reward/cut_fraction": 0.5}


def test_a_rank_may_have_no_rows(bench) -> None:
    empty = bench.batch([], response_tokens=[]).with_columns({"messages": Column.text([])})
    context = bench.context("reward", engine=Classifier(), engines=engines("hf"), nodes=node())
    (output,) = reward_model([OpInput(0, empty)], context)
    assert len(output.columns["reward"]) == 0


def test_it_scores_the_rows_of_a_source_and_leaves_the_others_to_a_merge(bench, prompt) -> None:
    said = [bench.tokenizer.encode(text) for text in ("2", "345", "67")]
    columns = {"messages": Column.text([prompt] * 3), "data_set": Column.text(["maths", "essays", "maths"])}
    batch = bench.batch([2, 3, 4], response_tokens=said).with_columns(columns)
    classifier = Classifier()
    chosen = {"reward": {**node()["reward"], "rows": {"data_set": ["essays"]}, "write": "judged"}}
    context = bench.context("reward", engine=classifier, engines=engines("hf"), nodes=chosen)
    (output,) = reward_model([OpInput(0, batch)], context)
    assert len(classifier.conversations) == 1
    np.testing.assert_equal(output.columns["reward"].values, np.array([np.nan, 3, np.nan], dtype=np.float32))
    assert output.stats["reward/judged"].count == 1
