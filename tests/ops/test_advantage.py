"""Advantages of shards, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from work import changed

from dagrl.config.schema import Scope
from dagrl.data.batch import Batch, Column
from dagrl.ops.advantage import advantage
from dagrl.ops.base import OpInput


@pytest.fixture
def part(bench) -> OpInput:
    """Two groups of two, with responses of one and two tokens."""
    batch = bench.batch(
        [4, 5, 6, 7],
        group_id=[2, 2, 3, 3],
        reward=[1, 0, 5, 5],
        response_mask=[[1], [1, 1], [1, 1], [1]],
        old_logprob=[[-1], [-1, -2], [-3, -1], [-2]],
        ref_logprob=[[-2], [-2, -3], [-3, -1], [-1]],
    )
    return OpInput(1, batch)


def node(**options) -> dict:
    return {"advantage": {"op": "advantage", "estimator": "grpo", **options}}


def test_rewards_are_compared_within_their_group(bench, part) -> None:
    (output,) = advantage([part], bench.context("advantage", nodes=node(normalize_by_std=False)))
    assert (output.shards, output.rows.tolist()) == ((1,), [4, 5, 6, 7])
    column = output.columns["advantage"]
    assert column.values.tolist() == [0.5, -0.5, -0.5, 0, 0, 0]
    assert column.lengths.tolist() == [1, 2, 2, 1]
    assert output.stats == {}


def test_advantages_are_divided_by_the_groups_deviation_by_default(bench, part) -> None:
    (output,) = advantage([part], bench.context("advantage", nodes=node()))
    # 1 and 0 have the sample's standard deviation sqrt(1 / 2).
    assert output.columns["advantage"].values.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), -(0.5**0.5), 0, 0, 0])


def test_the_divergence_is_charged_to_the_reward_before_groups_are_compared(bench, part) -> None:
    # By k1 the responses diverge by 1, 2, 0 and -1: rewards 0.9, -0.2, 5 and 5.1.
    options = node(normalize_by_std=False, kl_in_reward={"coef": 0.1})
    (output,) = advantage([part], bench.context("advantage", nodes=options))
    expected = [0.55, -0.55, -0.55, -0.05, -0.05, 0.05]
    assert output.columns["advantage"].values.tolist() == pytest.approx(expected)
    charge = output.stats["kl/in_reward"]
    assert (charge.mean, charge.high, charge.count) == (pytest.approx(0.05), pytest.approx(0.2), 4)


def test_the_estimator_of_the_charge_is_the_nodes(bench, part) -> None:
    # By k2, half the square for each token: 0.5, 1, 0 and 0.5; by k1 the last would be below 0.
    options = node(kl_in_reward={"coef": 1.0, "estimator": "k2"})
    (output,) = advantage([part], bench.context("advantage", nodes=options))
    charge = output.stats["kl/in_reward"]
    assert (charge.low, charge.high, charge.total) == (0.0, pytest.approx(1.0), pytest.approx(2.0))


def test_a_controlled_kl_weight_is_logged_with_its_divergence(bench, part) -> None:
    # By k1 the responses diverge by 1, 2, 0 and -1, and by 1, 1, 0 and -1 a token. The weight is the step's, not 0.1.
    options = node(normalize_by_std=False, kl_in_reward={"coef": 0.1, "target_kl": 0.5})
    context = changed(bench.context("advantage", nodes=options), kl_weight=0.2)
    (output,) = advantage([part], context)
    assert output.columns["advantage"].values.tolist() == pytest.approx([0.6, -0.6, -0.6, -0.1, -0.1, 0.1])
    divergence, weight = output.stats["kl/reward_divergence"], output.stats["kl/reward_weight"]
    assert (divergence.count, divergence.mean) == (4, pytest.approx(0.25))
    assert (divergence.low, divergence.high) == (pytest.approx(-1), pytest.approx(1))
    assert weight.mean == 0.2


def test_the_kl_controller_uses_trained_tokens_only(bench, part) -> None:
    # Of the second response the last token counts, of the third none.
    mask = bench.batch([4, 5, 6, 7], response_mask=[[1], [0, 1], [0, 0], [1]])["response_mask"]
    options = node(kl_in_reward={"coef": 0.1, "target_kl": 0.5})
    masked = replace(part, batch=part.batch.with_columns({"response_mask": mask}))
    (output,) = advantage([masked], bench.context("advantage", nodes=options))
    divergence = output.stats["kl/reward_divergence"]
    assert (divergence.count, divergence.total) == (3, pytest.approx(1 + 1 - 1))


def test_a_rank_without_rows_has_no_advantages(bench) -> None:
    empty = bench.batch([], group_id=[], reward=[], response_mask=[], old_logprob=[], ref_logprob=[])
    (output,) = advantage([OpInput(0, empty)], bench.context("advantage", nodes=node(kl_in_reward={"coef": 0.1})))
    assert len(output.columns["advantage"]) == 0


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [0.5**0.5, -(0.5**0.5), -(0.5**0.5)]),
        ("dr_grpo", [0.5, -0.5, -0.5]),
        ("rloo", [1, -1, -1]),
        # Baseline (1 * 1 + 2 * 0) / 3.
        ("opo", [2 / 3, -1 / 3, -1 / 3]),
        # Half of the responses are of groups with a difference.
        ("gpg", [1, -1, -1]),
        # Tokens 0.5, -0.5, -0.5, 0, 0, 0: mean -1/12, sample variance (3/4 - 6/144) / 5 = 0.1416667.
        ("reinforce_plus_plus_baseline", [1.5498256, -1.1070183, -1.1070183]),
        # Tokens 1, 0, 0, 5, 5, 5: mean 8/3, sample variance (76 - 6 * 64/9) / 5 = 6.6666667.
        ("reinforce_plus_plus", [-0.6454972, -1.0327956, -1.0327956]),
    ],
)
def test_each_estimator_can_be_named(bench, part, estimator, expected) -> None:
    (output,) = advantage([part], bench.context("advantage", nodes=node(estimator=estimator)))
    assert output.columns["advantage"].values.tolist()[:3] == pytest.approx(expected, abs=1e-6)
    assert output.columns["advantage"].lengths.tolist() == [1, 2, 2, 1]


def test_mirror_descents_baseline_and_temperature_are_the_nodes(bench, part) -> None:
    # log((e + 1) / 2) = 0.6201145.
    options = node(estimator="opmd", baseline="logavgexp", tau=1.0)
    (output,) = advantage([part], bench.context("advantage", nodes=options))
    assert output.columns["advantage"].values.tolist()[:3] == pytest.approx([0.3798855, -0.6201145, -0.6201145])


def test_remax_compares_with_the_likeliest_response(bench, part) -> None:
    baseline = bench.batch([4, 5, 6, 7], reward=[0.25, 0.25, 6, 6])["reward"]
    compared = replace(part, batch=part.batch.with_columns({"baseline_reward": baseline}))
    (output,) = advantage([compared], bench.context("advantage", nodes=node(estimator="remax")))
    assert output.columns["advantage"].values.tolist() == [0.75, -0.25, -0.25, -1, -1, -1]


def test_remax_charges_tokens_and_not_responses(bench, part) -> None:
    # By k1 the tokens diverge by 1 | 1, 1 | 0, 0 | -1; rewards less baselines are 0.75, -0.25, -1, -1.
    baseline = bench.batch([4, 5, 6, 7], reward=[0.25, 0.25, 6, 6])["reward"]
    compared = replace(part, batch=part.batch.with_columns({"baseline_reward": baseline}))
    options = node(estimator="remax", kl_in_reward={"coef": 0.5})
    (output,) = advantage([compared], bench.context("advantage", nodes=options))
    assert output.columns["advantage"].values.tolist() == [0.25, -1.25, -0.75, -1, -1, -0.5]
    assert output.stats["kl/in_reward"].total == pytest.approx(0.5 * (1 + 2 + 0 - 1))


@pytest.mark.parametrize(
    ("estimator", "fraction"), [("k3", pytest.approx(2 / 4)), ("k1", None), ("k2", None), ("abs", None)]
)
def test_tokens_whose_charge_has_reached_its_bound_are_counted(bench, part, estimator, fraction) -> None:
    # Differences 1 | 90, masked | 0, -89 | masked: two of the four tokens that count are beyond the bound of k3.
    columns = bench.batch(
        [4, 5, 6, 7],
        old_logprob=[[-1], [-1, -2], [-3, -90], [-2]],
        ref_logprob=[[-2], [-91, -95], [-3, -1], [-99]],
        response_mask=[[1], [1, 0], [1, 1], [0]],
    )
    far = replace(part, batch=part.batch.with_columns({name: columns[name] for name in columns.columns}))
    options = node(kl_in_reward={"coef": 0.1, "estimator": estimator})
    (output,) = advantage([far], bench.context("advantage", nodes=options))
    told = output.stats.get("kl/in_reward_clip_fraction")
    assert (told.mean if told else None) == fraction
    if estimator == "k3":
        assert output.stats["kl/in_reward"].high == pytest.approx(0.1 * 10)


@pytest.mark.parametrize(
    ("estimator", "scope"),
    [
        ("grpo", Scope.GROUP),
        ("dr_grpo", Scope.GROUP),
        ("rloo", Scope.GROUP),
        ("opo", Scope.GROUP),
        ("reinforce_plus_plus", Scope.BATCH),
        ("reinforce_plus_plus_baseline", Scope.BATCH),
    ],
)
def test_whitening_estimators_need_the_whole_batch(bench, estimator, scope) -> None:
    contract = bench.context("advantage", nodes=node(estimator=estimator)).node.contract()
    assert contract.scope is scope
    assert ("group_id" in contract.reads) == (estimator != "reinforce_plus_plus")


def test_reinforce_plus_plus_charges_tokens_and_not_responses(bench, part) -> None:
    # By k1 the tokens diverge by 1 | 1, 1 | 0, 0 | -1, so returns are 0 | -2, -1 | 5, 5 | 6: mean 13/6, sample variance
    # (91 - 6 * 169/36) / 5 = 12.5666667.
    options = node(estimator="reinforce_plus_plus", kl_in_reward={"coef": 1.0})
    (output,) = advantage([part], bench.context("advantage", nodes=options))
    expected = [(value - 13 / 6) / 12.5666667**0.5 for value in (0, -2, -1, 5, 5, 6)]
    assert output.columns["advantage"].values.tolist() == pytest.approx(expected, abs=1e-6)


def test_responses_near_the_longest_lose_points_before_groups_are_compared(bench, part) -> None:
    # Longest 3, buffer 2: one token is free, two cost half of 0.4. Rewards 1 and -0.2, 4.8 and 5.
    options = node(estimator="dr_grpo", overlong_buffer={"len": 2, "penalty_factor": 0.4})
    (output,) = advantage([part], bench.context("advantage", nodes=options))
    assert output.columns["advantage"].values.tolist() == pytest.approx([0.6, -0.6, -0.6, -0.1, -0.1, 0.1], abs=1e-6)
    penalty = output.stats["reward/overlong"]
    assert (penalty.low, penalty.high, penalty.mean) == (pytest.approx(-0.2), 0.0, pytest.approx(-0.1))


def test_length_terms_compare_with_the_longest_response_of_the_rows_source(bench, part) -> None:
    options = node(estimator="dr_grpo", overlong_buffer={"len": 2, "penalty_factor": 0.4})
    own = {"path": "b.parquet", "sampling": {"max_new_tokens": 4}}
    context = bench.context("advantage", nodes=options, data={"train": {"sums": "a.parquet", "long": own}})
    batch = part.batch.with_columns({"data_set": Column.text(["sums", "long", "sums", "long"])})
    (output,) = advantage([OpInput(0, batch)], context)
    # Two tokens cost nothing where four are allowed, and half of 0.4 where three are.
    lengths, names = batch["response_mask"].lengths.tolist(), batch["data_set"].strings()
    expected = [-0.2 if (length, name) == (2, "sums") else 0.0 for length, name in zip(lengths, names, strict=True)]
    assert output.stats["reward/overlong"].total == pytest.approx(sum(expected))
    assert sum(expected) < 0


@pytest.fixture
def taught(part) -> OpInput:
    """The same responses with a teacher that prefers the second tokens by 1."""
    teacher = Column.ragged([[-1], [-1, -1], [-3, 0], [-2]], "float32")
    return replace(part, batch=part.batch.with_columns({"teacher_logprob": teacher}))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"estimator": "none"}, [0, 0, 1, 0, 1, 0]),
        ({"estimator": "none", "coef": 0.5, "discount": 1.0}, [0, 0.5, 0.5, 0.5, 0.5, 0]),
        ({"estimator": "dr_grpo"}, [0.5, -0.5, 0.5, 0, 1, 0]),
        # Rewards 1, 0, 0, 5, 5, 5 of the tokens, with 1 for the third and fifth: 1, 0, 1, 5, 6, 5 of mean 3.
        ({"estimator": "reinforce_plus_plus"}, (np.array([1, 0, 1, 5, 6, 5]) - 3) / np.sqrt(34 / 5)),
    ],
)
def test_what_a_teacher_prefers_is_added_before_advantages_are_whitened(bench, taught, options, expected) -> None:
    distillation = {key: options[key] for key in ("coef", "discount") if key in options}
    options = node(estimator=options["estimator"], distillation=distillation)
    (output,) = advantage([taught], bench.context("advantage", nodes=options))
    assert output.columns["advantage"].values.tolist() == pytest.approx(list(expected))
    assert output.stats["distillation/kl"].mean == pytest.approx(-2 / 6)


def test_without_an_estimator_no_reward_is_read(bench, taught) -> None:
    batch = Batch(taught.batch.rows, {name: each for name, each in taught.batch.columns.items() if name != "reward"})
    options = node(estimator="none", distillation={})
    (output,) = advantage([replace(taught, batch=batch)], bench.context("advantage", nodes=options))
    assert output.columns["advantage"].values.tolist() == [0, 0, 1, 0, 1, 0]
