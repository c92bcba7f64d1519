"""Statistics of parts, merged, are those of the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.data.stats import Stat, merge

numbers_ = st.lists(st.floats(-1e3, 1e3), max_size=20)


@given(st.lists(numbers_, max_size=5))
def test_merged_parts_equal_the_whole(parts: list[list[float]]) -> None:
    whole = np.array([value for part in parts for value in part])
    merged = merge({"x": Stat.of(part)} for part in parts)
    if not whole.size:
        assert all(math.isnan(stat.mean) and math.isnan(stat.std) for stat in merged.values())
        return
    stat = merged["x"]
    assert stat.count == whole.size
    assert (stat.low, stat.high) == (whole.min(), whole.max())
    assert stat.mean == pytest.approx(whole.mean(), rel=1e-12, abs=1e-9)
    # The variance is a difference of squares of up to 1e6, each good to about 1e-16.
    assert stat.std**2 == pytest.approx(whole.var(), abs=1e-8)


def test_numbers_worked_out_by_hand() -> None:
    stat = Stat.of(np.array([[1.0, 2.0], [3.0, 6.0]], dtype=np.float32))
    assert (stat.count, stat.total, stat.squares, stat.low, stat.high) == (4, 12.0, 50.0, 1.0, 6.0)
    assert stat.mean == 3.0
    assert stat.std == pytest.approx(math.sqrt(3.5))


def test_any_iterable_of_numbers_will_do() -> None:
    assert Stat.of(value for value in (1, 2, 3)) == Stat.of([1.0, 2.0, 3.0])


def test_equal_numbers_have_no_spread() -> None:
    assert Stat.of([0.1] * 7).std == pytest.approx(0.0, abs=1e-8)


def test_a_mean_of_two_fractions_weighs_them() -> None:
    both = Stat.weighted(3.0, 1.0) + Stat.weighted(1.0, 3.0)
    assert both.mean == 1.0
    assert (both.low, both.high) == (pytest.approx(1 / 3), 3.0)


@pytest.mark.parametrize("nothing", [Stat.of([]), Stat.weighted(0.0, 0.0)])
def test_nothing_adds_nothing(nothing: Stat) -> None:
    some = Stat.of([2.0, 4.0])
    assert nothing + some == some
    assert some + nothing == some
    assert math.isnan(nothing.mean)


def test_names_are_merged_apart() -> None:
    merged = merge([{"a": Stat.of([1.0])}, {"b": Stat.of([2.0])}, {"a": Stat.of([3.0])}])
    assert (merged["a"].mean, merged["b"].mean) == (2.0, 2.0)
    assert (merged["a"].count, merged["b"].count) == (2, 1)
