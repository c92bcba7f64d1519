"""Tallies of parts, read together, are the statistics of the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dagrl.data.stats import Stat
from dagrl.data.tally import read_tallies, tally, tally_mean

part_ = st.lists(st.tuples(st.floats(-1e3, 1e3), st.booleans()), max_size=6)


def tallied(part: list[tuple[float, bool]]) -> dict[str, torch.Tensor]:
    values = torch.tensor([value for value, _ in part], dtype=torch.float64)
    return tally({"x": values, "twice": 2 * values}, torch.tensor([counted for _, counted in part], dtype=torch.bool))


@given(st.lists(part_, max_size=4))
def test_parts_are_read_as_the_statistics_of_what_is_counted(parts: list[list[tuple[float, bool]]]) -> None:
    found = read_tallies([tallied(part) for part in parts])
    if not parts:
        assert found == {}
        return
    for name, factor in (("x", 1), ("twice", 2)):
        expected = Stat.of([factor * value for part in parts for value, counted in part if counted])
        assert (found[name].count, found[name].low, found[name].high) == (expected.count, expected.low, expected.high)
        assert found[name].total == pytest.approx(expected.total, abs=1e-9)
        assert found[name].squares == pytest.approx(expected.squares, rel=1e-12)


def test_uncounted_values_may_be_anything() -> None:
    values = torch.tensor([1.0, math.nan, -math.inf, 3.0])
    (stat,) = read_tallies([tally({"x": values}, torch.tensor([True, False, False, True]))]).values()
    assert stat == Stat.of([1.0, 3.0])


def test_parts_may_lack_some() -> None:
    one, other = tally({"x": torch.ones(2)}, torch.ones(2).bool()), tally({"y": torch.zeros(1)}, torch.ones(1).bool())
    assert tally({}, torch.ones(2).bool()) == {}
    assert read_tallies([one, {}, other]) == {"x": Stat.of([1, 1]), "y": Stat.of([0])}


def test_a_weighted_mean_is_that_of_all_parts() -> None:
    # (1 * 0.5 + 4 * 0.25) / 0.75; the second part weighs nothing, whatever it holds.
    parts = [(torch.tensor([1.0, 4.0]), torch.tensor([0.5, 0.25])), (torch.tensor([9.0]), torch.tensor([0.0]))]
    stat = read_tallies([{"x": tally_mean(*part)} for part in parts])["x"]
    assert stat == Stat.weighted(1.5, 0.75)
    assert (stat.mean, stat.low, stat.high) == (2.0, 2.0, 2.0)
    assert read_tallies([{"x": tally_mean(*parts[1])}])["x"] == Stat.of(())


def test_gradients_stay_out() -> None:
    values = torch.ones(2, requires_grad=True)
    assert not tally({"x": values}, torch.ones(2).bool())["x"].requires_grad
    assert not tally_mean(values, torch.ones(2)).requires_grad


def test_tallies_have_the_fields_of_a_stat_in_their_order() -> None:
    (row,) = tally({"x": torch.tensor([1.0, 2.0])}, torch.ones(2).bool()).values()
    assert Stat(*row.tolist()) == Stat.of(np.array([1.0, 2.0]))
