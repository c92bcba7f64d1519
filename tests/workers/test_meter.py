"""What a run has taken: tokens and operations of its rows, told once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from work import work_of as make_work

from dagrl.config.schema import Pipeline
from dagrl.data.batch import Batch, Column
from dagrl.ops.base import OpInput, Output
from dagrl.ops.work import TaskWork
from dagrl.workers.messages import Usage
from dagrl.workers.meter import Meter

PROMPTS, RESPONSES = [3, 2, 4], [2, 1, 5]
LENGTHS = [5, 3, 9]
PER_TOKEN = 2 * 2 * (32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 64)
"""Of the tiny pipeline's two layers: hidden 32, four heads and two groups of 8, MLP of 64."""
PER_PAIR = 2 * 2 * (2 * 4 * 8)
PER_PREDICTION = 2 * 32 * 15
"""Twelve characters and three special tokens."""
FORWARD = PER_TOKEN * 17 + PER_PAIR * (25 + 9 + 81) // 2 + PER_PREDICTION * 8


@pytest.fixture
def pipeline(lab) -> Any:
    def make(head: str = "lm", **update: Any) -> Pipeline:
        declared = lab.tiny_pipeline()
        declared["engines"]["actor"]["head"] = head
        declared["nodes"]["update"] |= update
        return TypeAdapter(Pipeline).validate_python(declared)

    return make


def rows(*places: int) -> OpInput:
    columns = {
        "prompt_tokens": Column.ragged([[1] * PROMPTS[row] for row in places], "int64"),
        "response_tokens": Column.ragged([[1] * RESPONSES[row] for row in places], "int64"),
    }
    return OpInput(0, Batch(np.array(places, dtype=np.int64), columns))


def work_of(node: str, is_output_rank: bool = True) -> TaskWork:
    return make_work(TaskWork, node, is_output_rank=is_output_rank)


def usages(
    pipeline: Pipeline, node: str, *parts: OpInput, outputs: int = 1, is_output_rank: bool = True
) -> list[Usage]:
    meter = Meter(pipeline)
    account = meter.begin(work_of(node, is_output_rank), parts)
    return [meter.usage(account, Output((0,), np.arange(3))) for _ in range(outputs)]


def test_a_log_prob_pass_is_a_forward_pass_over_prompts_and_responses(pipeline) -> None:
    (usage,) = usages(pipeline(), "ref", rows(0, 1, 2))
    assert (usage.tokens, usage.flops) == (sum(LENGTHS), FORWARD)


def test_an_update_is_three_times_that_for_each_epoch(pipeline) -> None:
    (usage,) = usages(pipeline(epochs=2), "update", rows(0, 1), rows(2))
    assert (usage.tokens, usage.flops) == (2 * sum(LENGTHS), 2 * 3 * FORWARD)


def test_usage_is_reported_once(pipeline) -> None:
    first, second = usages(pipeline(), "old", rows(0), rows(1, 2), outputs=2)
    assert (first.tokens, first.flops) == (sum(LENGTHS), FORWARD)
    assert (second.tokens, second.flops) == (0, 0)


def test_only_the_output_rank_reports_usage(pipeline) -> None:
    (usage,) = usages(pipeline(), "update", rows(0, 1, 2), is_output_rank=False)
    assert (usage.tokens, usage.flops) == (0, 0)


def test_a_rank_without_rows_reports_zero(pipeline) -> None:
    (usage,) = usages(pipeline(), "update", rows())
    assert (usage.tokens, usage.flops) == (0, 0)


def test_a_value_head_is_cheaper_and_a_reward_head_computes_one_position_a_row(pipeline) -> None:
    body = FORWARD - PER_PREDICTION * 8
    for head, positions in (("value", 8), ("reward", 3)):
        (usage,) = usages(pipeline(head), "old", rows(0, 1, 2))
        assert usage.flops == body + 2 * 32 * positions


def test_a_rollout_counts_sampled_tokens_and_no_operations(pipeline) -> None:
    meter = Meter(pipeline())
    first, second = (meter.begin(work_of("rollout"), []) for _ in range(2))
    # Shares of a run are under way at once.
    told = [meter.usage(account, Output((), np.arange(2), sampled=7)) for account in (first, second, first)]
    assert [(each.tokens, each.flops) for each in told] == [(7, None)] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="here there is a GPU")
def test_without_a_gpu_there_is_no_peak_and_no_memory(pipeline) -> None:
    (usage,) = usages(pipeline(), "ref", rows(0))
    assert (usage.peak_flops_per_s, usage.peak_bytes) == (None, None)


@pytest.mark.parametrize(("validation", "passes"), [(False, 2 * 3), (True, 1)])
def test_demonstrations_are_trained_on_and_in_validation_read_once(pipeline, validation: bool, passes: int) -> None:
    part = rows(0, 1, 2)
    columns = {"prompt_tokens": part.batch["prompt_tokens"], "demonstration": part.batch["response_tokens"]}
    declared = pipeline().model_dump(exclude_unset=True)
    declared["data"] |= {"responses": ["response"], "max_response_tokens": 5}
    declared["nodes"]["update"] = {"op": "sft", "engine": "actor", "epochs": 2}
    meter = Meter(Pipeline.model_validate(declared))
    work = replace(work_of("update"), validation=validation)
    account = meter.begin(work, [OpInput(0, Batch(part.batch.rows, columns))])
    tokens = sum(LENGTHS) if validation else 2 * sum(LENGTHS)
    assert (account.tokens, account.flops) == (tokens, passes * FORWARD)
