"""Tokens that an update holds back, of a step's batch."""

from __future__ import annotations

import numpy as np
import pytest

from dagrl.data.batch import Column
from dagrl.ops.base import OpInput
from dagrl.ops.covariance import covariance

# Log-probs -1 .. -4 with advantages 2, 0, -2 and 2: parts 2.25, -0.25, 1.25 and -2.25; one token does not count.
ROWS = {3: ([-1, -2], [2, 0], [1, 1]), 8: ([-3, -9, -4], [-2, 50, 2], [1, 0, 1])}


@pytest.fixture
def marks(bench):
    """What a node with these options marks of rows in this order: row -> marks; and its metrics."""

    def run(rows=(3, 8), seed=3, **options):
        logprob, advantage, mask = zip(*(ROWS[row] for row in rows), strict=True)
        batch = bench.batch(list(rows), old_logprob=logprob, advantage=advantage, response_mask=mask)
        nodes = {"marks": {"op": "covariance", **options}}
        context = bench.context("marks", nodes=nodes, run={"steps": 6, "seed": seed})
        (output,) = covariance([OpInput(0, batch)], context)
        column = output.columns["clip_cov_mask"]
        return {row: column[place].tolist() for place, row in enumerate(rows)}, output.stats

    return run


def test_the_tokens_with_the_largest_part_are_marked(marks) -> None:
    found, stats = marks(share=0.5)
    assert found == {3: [1, 0], 8: [1, 0, 0]}
    assert stats["covariance/mean"].mean == pytest.approx(0.25)
    assert (stats["covariance/held_back_fraction"].mean, stats["covariance/held_back_fraction"].count) == (0.5, 4)


def test_by_default_one_token_at_least_is_marked(marks) -> None:
    assert marks()[0] == {3: [1, 0], 8: [0, 0, 0]}


def test_an_experts_rows_are_neither_marked_nor_part_of_the_means(bench, marks) -> None:
    batch = bench.batch(
        [3, 4],
        old_logprob=[ROWS[3][0], [-90, -80]],
        advantage=[ROWS[3][1], [0, 0]],
        response_mask=[[1, 1], [1, 1]],
    ).with_columns({"is_expert": Column(np.array([0, 1], dtype=np.float32))})
    context = bench.context("marks", nodes={"marks": {"op": "covariance", "share": 0.5}})
    (output,) = covariance([OpInput(0, batch)], context)
    alone, stats = marks(rows=(3,), share=0.5)
    assert output.columns["clip_cov_mask"].values.tolist() == [*alone[3], 0, 0]
    assert output.stats == stats


def test_a_draw_is_the_same_whatever_the_order_of_rows_and_another_with_another_seed(marks) -> None:
    options = {"share": 0.3, "between": [-1.0, 3.0]}
    draws = [marks(seed=seed, **options)[0] for seed in range(20)]
    assert draws == [marks(rows=(8, 3), seed=seed, **options)[0] for seed in range(20)]
    assert len({str(sorted(draw.items())) for draw in draws}) == 3
    for draw in draws:
        assert sum(map(sum, draw.values())) == 1
        assert draw[8][1:] == [0, 0]


def test_m2po_marks_tokens_by_their_ratio_to_the_generator(bench, marks) -> None:
    # log r 0.3, 0.1 | -0.5, -, 0.2 with advantages 2, 0, -2, -, 2: of the squares 0.09, 0.25 and 0.04 two may stay.
    logprob, advantage, mask = zip(*(ROWS[row] for row in (8, 3)), strict=True)
    sampled = [[-2.5, -9, -4.2], [-1.3, -2.1]]
    columns = {"old_logprob": logprob, "rollout_logprob": sampled, "advantage": advantage, "response_mask": mask}
    context = bench.context("marks", nodes={"marks": {"op": "covariance", "second_moment": 0.07}})
    (output,) = covariance([OpInput(0, bench.batch([8, 3], **columns))], context)
    assert output.columns["clip_cov_mask"].values.tolist() == [1, 0, 0, 0, 0]
    assert output.stats["covariance/second_moment"].mean == pytest.approx((0.09 + 0.25 + 0.04) / 3)
    assert output.stats["covariance/held_back_fraction"].mean == 0.25


def test_the_tokens_with_the_highest_entropy_alone_are_trained(bench) -> None:
    columns = {"entropy": [[0.2, 0.9], [0.4, 99.0, 0.1]], "response_mask": [[1, 1], [1, 0, 1]]}
    context = bench.context("marks", nodes={"marks": {"op": "covariance", "top_entropy": 0.5}})
    (output,) = covariance([OpInput(0, bench.batch([3, 8], **columns))], context)
    assert output.columns["clip_cov_mask"].values.tolist() == [1, 0, 0, 0, 1]
    assert output.stats["covariance/entropy"].mean == pytest.approx(0.4)
    assert output.stats["covariance/held_back_fraction"].mean == 0.5


def test_a_step_without_rows_has_no_marks(marks, bench) -> None:
    batch = bench.batch([], old_logprob=[], advantage=[], response_mask=[])
    context = bench.context("marks", nodes={"marks": {"op": "covariance"}})
    (output,) = covariance([OpInput(0, batch)], context)
    assert np.size(output.columns["clip_cov_mask"].values) == 0
