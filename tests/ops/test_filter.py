"""Which groups of a round pass."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dagrl.data.batch import Batch, Column
from dagrl.ops.base import OpInput
from dagrl.ops.filter import filter, passes_bounds

DOCUMENT = Path(__file__).parents[2] / "docs" / "filter.md"
RULES = """
def spread(reward, response_tokens, least=2):
    return len({len(tokens) for tokens in response_tokens}) >= least and bool(reward.mean() > 0)


def undecided(reward):
    return reward


def broken(reward):
    raise KeyError("no such thing")
"""


@pytest.fixture
def kept(bench):
    """Groups that pass, of columns with a row for each sample."""
    bench.write_module("rules", RULES)

    def run(columns: dict[str, Column], node: dict, **data) -> tuple[list[int], dict]:
        rows = np.arange(len(columns["group_id"]))
        nodes = {"rollout": {"op": "rollout", "engine": "generator", "n": 2, "sampling": {"max_new_tokens": 3}}}
        context = bench.context("keep", nodes={**nodes, "keep": {"op": "filter", **node}}, data=data)
        (output,) = filter([OpInput(0, Batch(rows, columns))], context)
        groups = columns["group_id"].values[output.rows]
        found = np.unique(groups)
        assert output.rows.tolist() == np.flatnonzero(np.isin(columns["group_id"].values, found)).tolist()
        assert output.columns == {}
        return found.tolist(), dict(output.stats)

    return run


def rewards(*groups: list[float], first: int = 0) -> dict[str, Column]:
    ids = [first + number for number, group in enumerate(groups) for _ in group]
    values = [value for group in groups for value in group]
    return {"group_id": Column(np.array(ids)), "reward": Column(np.array(values, dtype=np.float32))}


def test_bounds_of_a_source_replace_those_that_they_name(kept):
    columns = rewards([0, 0], [0.2, 0.2], [0.9, 0.9], [0, 0], [0.2, 0.2], [0.9, 0.9])
    columns["data_set"] = Column.text(["sums"] * 6 + ["code"] * 6)
    node = {"lower": 0.1, "upper": 0.5}
    assert kept(columns, node)[0] == [1, 4]
    assert kept(columns, node | {"by_source": {"code": {"upper": 1.0}}})[0] == [1, 4, 5]
    assert kept(columns, node | {"by_source": {"code": {"lower": None}, "sums": {"upper": 0.15}}})[0] == [3, 4]
    assert kept(columns, {"min_std": 0.1, "by_source": {"code": {"min_std": None, "lower": 0.5}}})[0] == [5]


@pytest.mark.parametrize(
    ("node", "code", "passing"),
    [
        ({}, {"upper": 0.9}, [2]),
        ({}, {"lower": 0.1}, [2]),
        ({}, {}, [2]),
        ({}, {"lower": -1.0, "upper": 0.4}, []),
        ({}, {"upper": 0.9, "min_std": None}, [0, 2]),
        ({}, {"upper": 0.9, "min_std": 0.5}, []),
        ({"min_std": 0.5}, {"upper": 0.9}, []),
        ({"upper": 0.9}, {"lower": -1.0}, [0, 2]),
    ],
)
def test_a_source_has_the_default_bound_of_the_node_unless_it_names_another(kept, node, code, passing):
    columns = rewards([0, 0], [1, 1], [0, 1]) | {"data_set": Column.text(["code"] * 6)}
    assert kept(columns, node | {"by_source": {"code": code}})[0] == passing


def test_what_is_kept_is_counted_by_source(kept):
    columns = rewards([0, 0], [0, 1], [0, 1], [0.5, 0.5])
    columns["data_set"] = Column.text(["sums"] * 4 + ["code"] * 2 + ["gone"] * 2)
    found, stats = kept(columns, {}, train={"sums": "a.parquet", "code": "b.parquet", "none": "c.parquet"})
    fractions = {name: (stat.mean, stat.count) for name, stat in stats.items() if name.startswith("train/")}
    assert fractions == {"train/sums/kept_fraction": (0.5, 2), "train/code/kept_fraction": (1.0, 1)}
    assert found == [1, 2]
    assert list(kept(columns, {})[1]) == ["filter/reward"]


def test_groups_whose_samples_all_got_the_same_are_left_out(kept):
    columns = rewards([0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1], [0.5, 0.5, 0.5, 0.25], first=7)
    assert kept(columns, {})[0] == [8, 10]


def test_equal_numbers_have_no_deviation_whatever_their_last_bits():
    # The mean of three tenths is not a tenth.
    values = np.array([0.1, 0.1, 0.1])
    assert values.std() > 0
    assert not passes_bounds(values, lower=None, upper=None, min_std=0.0)


@pytest.mark.parametrize(
    ("bounds", "passing"),
    [
        ({"lower": 0.25}, [2, 3, 4]),
        ({"upper": 0.75}, [0, 1, 2]),
        ({"lower": 0.0, "upper": 1.0}, [1, 2, 3]),
        # Deviations of 0, sqrt(3) / 4, 1 / 2, sqrt(3) / 4 and 0.
        ({"min_std": 0.45}, [2]),
        ({"min_std": 0.0, "lower": 0.4}, [2, 3]),
        ({"lower": -1.0}, [0, 1, 2, 3, 4]),
    ],
)
def test_bounds_are_exclusive(kept, bounds, passing):
    columns = rewards([0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1], [1, 1, 1, 1])
    assert kept(columns, bounds)[0] == passing


@settings(deadline=None)
@given(st.lists(st.integers(-8, 8), min_size=1, max_size=8), st.integers(-8, 8), st.integers(0, 8))
def test_a_group_passes_if_all_that_is_asked_holds(values, bound, least):
    mean, array = Fraction(sum(values), len(values)), np.array(values, dtype=np.float32)
    squares = Fraction(sum(value * value for value in values), len(values)) - mean**2
    assert passes_bounds(array, lower=bound, upper=None, min_std=None) == (mean > bound)
    assert passes_bounds(array, lower=None, upper=bound, min_std=None) == (mean < bound)
    # Whole deviations are met by rounding alone where they are not 0.
    assume(not least or squares != least**2)
    assert passes_bounds(array, lower=None, upper=None, min_std=least) == (squares > least**2)
    assert passes_bounds(array, lower=bound, upper=None, min_std=least) == (mean > bound and squares > least**2)


def test_the_metric_covers_all_samples(kept):
    _, stats = kept(rewards([0, 0], [0, 1]), {})
    assert (stats["filter/reward"].mean, stats["filter/reward"].count) == (0.25, 4)


def test_another_column_may_decide(kept):
    columns = rewards([0, 0], [0, 1]) | {"accuracy": Column(np.array([1.0, 0.0, 1.0, 1.0]))}
    found, stats = kept(columns, {"metric": "accuracy"})
    assert (found, list(stats)) == ([0], ["filter/accuracy"])


def test_a_column_of_tokens_has_no_number_for_a_sample(kept):
    columns = rewards([0, 0]) | {"scores": Column.ragged([[0.1], [0.2, 0.3]], "float32")}
    with pytest.raises(ValueError, match="`scores` has several; name another metric"):
        kept(columns, {"metric": "scores"})


def test_a_rule_of_the_users_own_sees_a_group_at_a_time(kept):
    tokens = Column.ragged([[1], [1, 2], [1], [1], [1], [1, 2]], "int64")
    columns = rewards([0, 1], [1, 1], [0, 0]) | {"response_tokens": tokens}
    assert kept(columns, {"fn": "rules:spread"}) == ([0], {})
    assert kept(columns, {"fn": "rules:spread", "args": {"least": 1}}) == ([0, 1], {})


def test_the_rule_of_the_documentation_does_what_it_says(kept, bench):
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    bench.write_module("my_rules", code)
    lengths = [[3000, 9], [10, 20], [9, 9], [3000, 9]]
    columns = rewards([1, 0], [1, 0], [1, 1], [0, 0]) | {
        "response_tokens": Column.ragged([[1] * length for group in lengths for length in group], "int64")
    }
    node = {"fn": "my_rules:hard_but_possible"}
    assert kept(columns, node)[0] == [1], "too long, as wanted, too easy, impossible"
    assert kept(columns, {**node, "args": {"most": 0.25}})[0] == []


def test_a_rule_that_fails_names_its_line(kept):
    with pytest.raises(ValueError, match=r"rules:broken raised KeyError: 'no such thing' \(.*rules.py:11\)"):
        kept(rewards([0, 1]), {"fn": "rules:broken"})


def test_a_rule_says_yes_or_no(kept):
    with pytest.raises(ValueError, match=r"rules:undecided \(.*rules\.py:\d+\) returned array\(.*return True or False"):
        kept(rewards([0, 1]), {"fn": "rules:undecided"})
