"""Estimators in a pipeline: columns and options that reach them, and rewards that they cannot use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from work import changed

from dagrl.config.schema import AdvantageNode, Scope
from dagrl.data.batch import Column
from dagrl.data.stats import Stat
from dagrl.ops.advantage import advantage
from dagrl.ops.base import OpInput


@pytest.fixture
def part(bench) -> OpInput:
    """Two groups of two, with responses of one and two tokens."""
    batch = bench.batch(
        [4, 5, 6, 7],
        group_id=[2, 2, 3, 3],
        reward=[1, 0, 0, 0],
        response_mask=[[1], [1, 1], [1, 1], [1]],
        data_set=["sums", "words", "sums", "words"],
        old_logprob=[[0], [0, 0], [0, 0], [0]],
        prob_square_sum=[[1.5], [1.5, 2], [1.5, 2], [1.25]],
    )
    return OpInput(1, batch)


def node(**options) -> dict:
    return {"advantage": {"op": "advantage", **options}}


def rewarded(part: OpInput, *rewards: float, name: str = "reward") -> OpInput:
    return replace(part, batch=part.batch.with_columns({name: Column(np.array(rewards, dtype=np.float32))}))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Mean 1/2: (1 - 1/2) / (1/2).
        ({"estimator": "maxrl"}, [1, -1, -1, 0, 0, 0]),
        # Sample variance of 1, 0, 0, 0: 1/4.
        ({"estimator": "grpo", "normalize_by_std": "batch"}, [1, -1, -1, 0, 0, 0]),
        ({"estimator": "grpo", "normalize_by_std": "group"}, [0.5**0.5, -(0.5**0.5), -(0.5**0.5), 0, 0, 0]),
        ({"estimator": "grpo", "normalize_by_std": "none"}, [0.5, -0.5, -0.5, 0, 0, 0]),
        # Sets of one are the responses themselves: mean 1/2, deviation 1/2.
        ({"estimator": "passk", "k": 1}, [1, -1, -1, 0, 0, 0]),
        # Each set of two has the right one.
        ({"estimator": "passk", "k": 2}, [0, 0, 0, 0, 0, 0]),
        ({"estimator": "grpo_passk"}, [2**0.5, 0, 0, 0, 0, 0]),
        ({"estimator": "grpo_passk", "normalize_by_std": False}, [1, 0, 0, 0, 0, 0]),
        # With p = 1, w = Pi - 1: W is 0.5 of both first tokens. The second token of each response is alone.
        ({"estimator": "optimal_token_baseline"}, [0.5, -0.5, 0, 0, 0, 0]),
    ],
)
def test_each_estimator_can_be_named(bench, part, options, expected) -> None:
    (output,) = advantage([part], bench.context("advantage", nodes=node(**options)))
    assert output.columns["advantage"].values.tolist() == pytest.approx(expected, abs=1e-6)
    assert output.columns["advantage"].lengths.tolist() == [1, 2, 2, 1]
    assert output.columns["advantage"].values.dtype == np.float32


def test_named_rewards_are_compared_one_by_one(bench, part) -> None:
    # Tokens of 1, -1, -1 from the first and 0, 0, then from the second -1, -1, 1 with weight 1/2, in units of
    # 1 / sqrt(2): 1, -1, -1, -1/2, -1/2, 1/2 with mean -1/4, sample variance (3.75 - 6 / 16) / 5 = 0.675.
    named = rewarded(rewarded(part, 1, 0, 0, 0, name="right"), 7, 7, -9, 9, name="polite")
    columns = {name: column for name, column in named.batch.columns.items() if name != "reward"}
    named = OpInput(1, replace(named.batch, columns=columns))
    options = node(estimator="gdpo", rewards={"right": 1.0, "polite": 0.5})
    (output,) = advantage([named], bench.context("advantage", nodes=options))
    expected = [(value + 0.25) / 0.675**0.5 for value in (1, -1, -1, -0.5, -0.5, 0.5)]
    assert output.columns["advantage"].values.tolist() == pytest.approx(expected, abs=1e-6)


def test_returns_of_turns_are_discounted_and_whitened(bench, part) -> None:
    # Turns of the last response: 1, then 3 of which 2 are on the tool's side of the last token; the rest is on its end.
    batch = bench.batch([4, 5], reward=[1, 4], response_mask=[[1], [1, 0, 1]], token_reward=[[0], [1, 0, 0]])
    options = node(estimator="agentic_reinforce", gamma=0.5)
    (output,) = advantage([OpInput(0, batch)], bench.context("advantage", nodes=options))
    # Returns 1 | 1 + 3/2, 3: mean 13/6, sample variance (1 + 6.25 + 9 - 3 * 169/36) / 2 = 1.0833333.
    expected = [(value - 13 / 6) / 1.0833333**0.5 for value in (1, 2.5, 3)]
    found = output.columns["advantage"].values.tolist()
    assert [found[place] for place in (0, 1, 3)] == pytest.approx(expected, abs=1e-6)
    assert found[2] == 0


def test_roles_have_baselines_that_continue(bench, part) -> None:
    # sums: 1 - 2, then b = 1.5: 0 - 1.5, then 0.75. words: 0 - 0, twice.
    context = bench.context("advantage", nodes=node(estimator="rae", decay=0.5))
    (output,) = advantage([part], changed(context, baselines={"sums": 2.0, "other": 4.0}))
    assert output.columns["advantage"].values.tolist() == [-1, 0, 0, -1.5, -1.5, 0]
    assert output.stats == {
        f"baseline/{role}": Stat.of([value]) for role, value in {"sums": 0.75, "other": 4.0, "words": 0.0}.items()
    }


def test_responses_of_roles_are_in_the_order_of_rows(bench, part) -> None:
    context = bench.context("advantage", nodes=node(estimator="rae", decay=0.5))
    (there,) = advantage([rewarded(part, 1, 2, 3, 4)], context)
    order = np.array([2, 0, 3, 1])
    (moved,) = advantage([OpInput(1, rewarded(part, 1, 2, 3, 4).batch.take(order))], context)
    assert moved.stats == there.stats
    assert moved.columns["advantage"].values.tolist() == there.columns["advantage"].take(order).values.tolist()


def test_a_role_may_be_a_number(bench, part) -> None:
    player = replace(part, batch=part.batch.with_columns({"player": Column(np.array([0, 10**7, 0, 10**7 + 1]))}))
    context = bench.context("advantage", nodes=node(estimator="rae", role="player"))
    (output,) = advantage([player], context)
    assert set(output.stats) == {"baseline/0", "baseline/10000000", "baseline/10000001"}


@pytest.mark.parametrize(
    ("estimator", "reward", "domain"),
    [
        ("maxrl", -0.5, "0 or more"),
        ("maxrl", np.nan, "0 or more"),
        ("passk", 0.5, "0 or 1"),
        ("passk", -1.0, "0 or 1"),
        ("passk", 2.0, "0 or 1"),
    ],
)
def test_a_reward_that_an_estimator_cannot_use_is_reported_with_its_row(bench, part, estimator, reward, domain) -> None:
    with pytest.raises(ValueError, match=rf"`{estimator}` needs rewards of {domain}, and row 6 has {reward:g}; "):
        advantages = advantage(
            [rewarded(part, 1, 0, reward, -7)], bench.context("advantage", nodes=node(estimator=estimator))
        )
        next(advantages)


@pytest.mark.parametrize(
    ("options", "scope", "reads"),
    [
        ({"estimator": "maxrl"}, Scope.GROUP, {"reward", "group_id"}),
        ({"estimator": "passk"}, Scope.GROUP, {"reward", "group_id"}),
        ({"estimator": "grpo_passk"}, Scope.GROUP, {"reward", "group_id"}),
        ({"estimator": "gdpo", "rewards": {"a": 1, "b": 2}}, Scope.BATCH, {"a", "b", "group_id"}),
        ({"estimator": "rae", "role": "player"}, Scope.BATCH, {"reward", "player"}),
        ({"estimator": "grpo", "normalize_by_std": "batch"}, Scope.BATCH, {"reward", "group_id"}),
        ({"estimator": "agentic_reinforce"}, Scope.BATCH, {"reward"}),
        (
            {"estimator": "optimal_token_baseline"},
            Scope.GROUP,
            {"reward", "group_id", "old_logprob", "prob_square_sum"},
        ),
    ],
)
def test_what_an_estimator_reads_and_sees_at_once(options, scope, reads) -> None:
    contract = AdvantageNode.model_validate({"op": "advantage", **options}).contract()
    assert contract.scope is scope
    assert set(contract.reads) == reads | {"response_mask"}


@pytest.mark.parametrize(
    "estimator", ["maxrl", "gdpo", "passk", "grpo_passk", "rae", "optimal_token_baseline", "agentic_reinforce"]
)
def test_a_rank_without_rows_has_no_advantages(bench, part, estimator) -> None:
    options = {"rewards": {"reward": 1.0}} if estimator == "gdpo" else {}
    context = bench.context("advantage", nodes=node(estimator=estimator, **options))
    (output,) = advantage([OpInput(0, part.batch.take(np.zeros(0, dtype=np.int64)))], context)
    assert len(output.columns["advantage"]) == 0


def test_advantages_and_targets_may_have_different_lambdas(bench) -> None:
    # Values 0.5 and 0.75, reward 1: steps 0.25, 0.25. With lambda 0 the advantages are the steps, with 1 the targets
    # are the return. Length-adaptive with alpha 1 and two tokens: lambda is 1/2, the first advantage 0.25 + 0.125.
    columns = {"reward": [1], "response_mask": [[1, 1]], "value": [[0.5, 0.75]]}
    part = OpInput(0, bench.batch([4], **columns))

    def run(**options) -> tuple[list[float], list[float]]:
        (output,) = advantage([part], bench.context("advantage", nodes=node(estimator="gae", **options)))
        return tuple(output.columns[name].values.tolist() for name in ("advantage", "return"))

    # Whitening makes two different numbers 1 / sqrt(2) and minus that, and equal ones 0.
    assert run(lam=0.0, lam_value=1.0) == ([0, 0], [1, 1])
    assert run(lam=0.0) == ([0, 0], [0.75, 1])
    high = pytest.approx(0.5**0.5)
    assert run(length_adaptive_alpha=1.0) == ([high, pytest.approx(-(0.5**0.5))], [1, 1])
    assert run(length_adaptive_alpha=1.0, lam=0.0)[1] == [0.75, 1]
