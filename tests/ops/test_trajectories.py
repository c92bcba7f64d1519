"""Trajectories of several rows count once: in baselines, rewards, filters and sequence means."""

from __future__ import annotations

import numpy as np
import pytest

from dagrl.algorithms.aggregation import token_weights
from dagrl.algorithms.objective import PolicyObjective
from dagrl.algorithms.value_loss import ValueObjective
from dagrl.config.schema import LossSpec
from dagrl.data.batch import Batch, Column
from dagrl.ops.advantage import advantage
from dagrl.ops.base import Context, OpInput
from dagrl.ops.filter import filter as filter_op
from dagrl.ops.judge import judge
from dagrl.ops.reward import reward
from dagrl.ops.samples import samples
from dagrl.ops.trajectories import joined_rows, with_lengths

AGENT = {"function": "bots:solve", "sequences": 2}
LENGTHS = (2, 1, 1, 3)
"""Two trajectories of two rows; the second row of the first is not used."""


@pytest.fixture
def context(bench):
    def context(node: str, **nodes: dict) -> Context:
        rollout = {"op": "rollout", "engine": "generator", "n": 2, "sampling": {"max_new_tokens": 9}, "agent": AGENT}
        return bench.context(node, nodes={"rollout": rollout, **nodes})

    return context


def rows(bench, **columns) -> Batch:
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    mask = np.array([1, 1, 0, 1, 1, 1, 0], dtype=np.float32)
    batch = bench.batch([4, 5, 6, 7], group_id=[1, 1, 1, 1], reward=[1.0, 1.0, 0.0, 0.0], **columns)
    return batch.with_columns({"response_mask": Column(mask, offsets)})


def test_a_baseline_takes_each_trajectory_once(bench, context) -> None:
    (output,) = advantage(
        [OpInput(0, rows(bench))], context("advantage", advantage={"op": "advantage", "estimator": "rloo"})
    )
    # Each minus the other: of four samples, two would be a trajectory's own.
    assert output.columns["advantage"].values.tolist() == [1, 1, 0, -1, -1, -1, 0]


def test_an_excluded_trajectory_is_part_of_no_baseline(bench, context) -> None:
    batch = rows(bench).with_columns({"excluded": Column(np.array([0, 0, 1, 1], dtype=np.float32))})
    node = {"op": "advantage", "estimator": "dr_grpo"}
    (output,) = advantage([OpInput(0, batch)], context("advantage", advantage=node))
    assert output.columns["advantage"].values.tolist() == [0] * 7, "one sample alone has nothing to be compared with"


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "seq-mean-token-sum", "token-mean"])
def test_shares_make_rows_one_sequence(aggregation) -> None:
    mask = Column(np.array([1, 1, 0, 1, 1, 1, 0], dtype=np.float32), np.concatenate([[0], np.cumsum(LENGTHS)]))
    whole = Column(mask.values, mask.offsets[::2])
    shares = np.array([1, 0, 1 / 3, 2 / 3], dtype=np.float32)
    weights, normalizer = token_weights(mask, aggregation, None, shares)
    expected, expected_normalizer = token_weights(whole, aggregation)
    np.testing.assert_allclose(weights.values, expected.values, rtol=1e-6)
    assert normalizer == pytest.approx(expected_normalizer)
    objective = PolicyObjective(LossSpec(policy="reinforce", aggregation=aggregation), 1.0, ["trajectory_share"])
    batch = Batch(np.arange(4), {"response_mask": mask, "trajectory_share": Column(shares)})
    critic = ValueObjective(cliprange=0.5, aggregation=aggregation, longest_response=9)
    for each in (objective, critic):
        assert each.token_weights(batch)[1][0] == pytest.approx(normalizer)


def test_a_limit_bounds_a_row_and_unused_rows_have_no_length(bench, context) -> None:
    batch, of = rows(bench), context("advantage")
    joined = with_lengths(joined_rows(batch, of), batch, of)
    assert joined["length"].values.tolist() == [2, 4]
    assert joined["longest_row"].values.tolist() == [2, 3]
    node = {"op": "advantage", "estimator": "rloo", "overlong_buffer": {"len": 7}}
    (output,) = advantage([OpInput(0, batch)], context("advantage", advantage=node))
    # Two tokens are free, and the third of seven costs 1/7: rewards 1 and -1/7.
    np.testing.assert_allclose(output.columns["advantage"].values[[0, 3]], [8 / 7, -8 / 7], rtol=1e-6)


def test_a_reward_is_the_first_rows(bench, context) -> None:
    columns = {
        "prompt_tokens": ["1+", "1", "2+", "3+"],
        "response_tokens": ["2", "1", "7", "777"],
        "answer": ["2"] * 4,
        "data_source": ["x"] * 4,
        "extra_info": ["{}"] * 4,
    }
    batch = rows(bench, **columns)
    (output,) = reward([OpInput(0, batch)], context("reward", reward={"op": "reward", "fn": "exact"}))
    assert output.columns["reward"].values.tolist() == [1, 1, 0, 0]
    given = batch.with_columns({"agent_reward": Column(np.array([0.5, 9, -1, 9], dtype=np.float32))})
    (output,) = reward([OpInput(0, given)], context("reward", reward={"op": "reward", "fn": "agent"}))
    assert output.columns["reward"].values.tolist() == [0.5, 0.5, -1, -1]


def test_a_filter_sees_each_trajectory_once(bench, context) -> None:
    batch = rows(bench).with_columns({"reward": Column(np.array([1, 0, 1, 0], dtype=np.float32))})
    node = {"op": "filter", "metric": "reward", "lower": 0.9}
    (output,) = filter_op([OpInput(0, batch)], context("keep", keep=node))
    assert output.rows.tolist() == [4, 5, 6, 7]


def test_a_filter_leaves_out_failed_agents(bench, context) -> None:
    """They have the reward 0, which says nothing about the policy."""

    def passes(node: dict, rewards: list[float], failed: list[int]) -> tuple[bool, float]:
        batch = rows(bench).with_columns(
            {
                "reward": Column(np.repeat(rewards, 2).astype(np.float32)),
                "excluded": Column(np.repeat(failed, 2).astype(np.float32)),
            }
        )
        (output,) = filter_op([OpInput(0, batch)], context("keep", keep={"op": "filter", **node}))
        return len(output.rows) == 4, output.stats["filter/reward"].count

    assert passes({}, [1, 0], [0, 0]) == (True, 2)
    assert passes({}, [1, 0], [0, 1]) == (False, 1), "one sample alone has nothing to be compared with"
    assert passes({"lower": 0.9}, [1, 0], [0, 1]) == (True, 1)
    assert passes({"upper": 0.5}, [0, 0], [1, 1]) == (False, 0)


def test_a_judge_scores_each_trajectory_once(bench, context, chat_server) -> None:
    chat_server.reply = lambda body: f"Score: {body['messages'][-1]['content'][-1]}"
    node = {"op": "judge", "prompt": "{response}", "endpoint": chat_server.url, "model": "judge-7b"}
    columns = {"response_tokens": ["2", "1", "7", "9"], "answer": ["2"] * 4, "data_source": ["x"] * 4}
    batch = rows(bench, **columns, messages=['[{"role": "user", "content": "1+1="}]'] * 4)
    before = len(chat_server.requests)
    (output,) = judge([OpInput(0, batch)], context("reward", reward=node))
    assert output.columns["reward"].values.tolist() == [2, 2, 7, 7]
    assert len(chat_server.requests) == before + 2, "the other rows are of the same trajectories"


@pytest.mark.parametrize(("validation", "mean"), [(False, 1.0), (True, 0.5)])
def test_a_failed_agent_counts_in_validation_alone(bench, validation, mean) -> None:
    rollout = {"op": "rollout", "engine": "generator", "n": 2, "sampling": {"max_new_tokens": 9}, "agent": "bots:solve"}
    context = bench.context(validation=validation, nodes={"rollout": rollout}, run={"steps": 1, "samples_per_step": 0})
    text = {name: ["x"] * 2 for name in ("answer", "data_source")}
    batch = bench.batch(
        [0, 1],
        group_id=[0, 1],
        prompt_tokens=["1", "2"],
        response_tokens=["1", "2"],
        reward=[1.0, 0.0],
        data_set=["val" if validation else "train"] * 2,
        **text,
        finish_reason=["stop", "error"],
    ).with_columns({"excluded": Column(np.array([0, 1], dtype=np.float32))})
    (output,) = samples([OpInput(0, batch)], context)
    assert output.stats["reward"].mean == mean


def test_validation_has_one_row_for_a_trajectory(bench, context) -> None:
    assert context("reward").sequences == 2 and context("reward").pipeline.rows_per_prompt() == 4
    validating = bench.context(
        "rollout",
        validation=True,
        nodes={
            "rollout": {
                "op": "rollout",
                "engine": "generator",
                "sampling": {"max_new_tokens": 9},
                "agent": AGENT,
            }
        },
    )
    assert validating.sequences == 1 and validating.pipeline.rows_per_prompt(validation=True) == 1
