"""Which metrics a validation has."""

from __future__ import annotations

import pytest

from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema.val_metrics import Vote, ks_of, names_at_k, vote_of


@pytest.mark.parametrize(("n", "ks"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (6, (1, 2, 4, 6))])
def test_powers_of_two_and_n_are_reported(n: int, ks: tuple[int, ...]) -> None:
    assert ks_of(n) == ks


def test_one_response_has_no_best() -> None:
    assert names_at_k(1, votes=True) == ["mean@1", "pass@1"]
    assert names_at_k(2, votes=False) == ["mean@2", "pass@1", "pass@2", "std@2", "best@2", "worst@2"]


def test_the_majority_is_scored_if_answers_can_be_extracted() -> None:
    without = ["mean@3", "pass@1", "pass@2", "pass@3", "std@3", "best@2", "best@3", "worst@2", "worst@3"]
    assert names_at_k(3, votes=False) == without
    assert names_at_k(3, votes=True) == [*without, "maj@2", "maj@3"]


@pytest.mark.parametrize(
    ("overrides", "vote"),
    [
        ([], Vote("exact")),
        (["nodes.reward={op: reward, fn: code}"], None),
        (["nodes.reward={op: reward, fn: code}", "data.val_vote=math"], Vote("math")),
        (["nodes.reward={op: reward, fn: math, args: {a: 1}}"], Vote("math", {"a": 1})),
        (["nodes.reward={op: reward, fn: math, args: {a: 1}}", "data.val_vote=math"], Vote("math", {"a": 1})),
        (["data.val_vote=my_votes:choice"], Vote("my_votes:choice")),
    ],
)
def test_answers_are_found_as_the_file_says_or_as_a_reward_finds_them(project, overrides, vote) -> None:
    assert vote_of(load_pipeline(project.folder / "p.yaml", overrides).pipeline) == vote
