"""Which metrics a validation has."""

from __future__ import annotations

import pytest

from dagrl.spec.val_metrics import ks_of, names_at_k


@pytest.mark.parametrize(("n", "ks"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (6, (1, 2, 4, 6))])
def test_powers_of_two_and_n_are_told(n: int, ks: tuple[int, ...]) -> None:
    assert ks_of(n) == ks


def test_one_response_has_no_best() -> None:
    assert names_at_k(1, votes=True) == ["mean@1", "pass@1"]


def test_the_majority_is_told_where_answers_can_be_found() -> None:
    without = ["mean@3", "pass@1", "pass@2", "pass@3", "std@3", "best@2", "best@3", "worst@2", "worst@3"]
    assert names_at_k(3, votes=False) == without
    assert names_at_k(3, votes=True) == [*without, "maj@2", "maj@3"]
