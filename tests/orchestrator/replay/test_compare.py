"""Where results differ, and by how much."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.orchestrator.replay.compare import compare_columns, compare_metrics, compare_weights

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any)


def batch(column: Column, first: int = 10) -> Batch:
    return Batch(np.arange(first, first + len(column)), {"values": column})


@given(LENGTHS, st.data())
def test_a_changed_bit_is_found_in_its_row(lengths: list[int], data: st.DataObject) -> None:
    values = np.arange(1, sum(lengths) + 1, dtype=np.float32)
    offsets = np.cumsum([0, *lengths])
    place = data.draw(st.integers(0, len(values) - 1))
    changed = values.copy()
    changed[place] = np.nextafter(values[place], np.float32(np.inf))
    recorded = batch(Column(values, offsets))
    assert compare_columns(recorded, batch(Column(values.copy(), offsets))) == []
    (found,) = compare_columns(recorded, batch(Column(changed, offsets)))
    row = int(np.searchsorted(offsets, place, side="right")) - 1
    assert found.rows == (10 + row,)
    assert f"row {10 + row}, value {place - offsets[row]}: " in found.text
    assert 0 < found.size < 2.4e-7


@pytest.mark.parametrize(
    ("left", "right", "told", "size"),
    [
        (
            Column(np.array([1.0, 2.0])),
            Column(np.array([1.0, 2.5])),
            "1 of 2 rows differ (11); row 11: 2.0 and 2.5",
            0.2,
        ),
        (Column(np.array([0.0])), Column(np.array([-0.0])), "1 of 1 rows differ (10); row 10: 0.0 and -0.0", 0.0),
        (Column(np.array([1, 2])), Column(np.array([1.0, 2.0])), "2 of 2 rows differ (10, 11)", 0.0),
        (Column(np.array([np.nan])), Column(np.array([1.0])), "1 of 1 rows differ (10); row 10: nan and 1.0", math.inf),
        (Column.ragged([[1, 2]], "int64"), Column.ragged([[1]], "int64"), "row 10 has 2 and 1 values", math.inf),
        (Column.text(["yes"]), Column.text(["no"]), "row 10: 'yes' and 'no'", math.inf),
    ],
)
def test_differences_are_reported_with_rows_and_sizes(left: Column, right: Column, told: str, size: float) -> None:
    (found,) = compare_columns(batch(left), batch(right))
    assert told in found.text
    assert found.size == pytest.approx(size)


def test_nan_equals_itself_and_a_missing_column_is_reported() -> None:
    column = Column(np.array([np.nan, 1.0]))
    assert compare_columns(batch(column), batch(column)) == []
    (found,) = compare_columns(batch(column), Batch(np.arange(10, 12), {}))
    assert (found.what, found.text) == ("column values", "is missing")


def test_metrics() -> None:
    same = {"lr": Stat.of([1]), "empty": Stat.of([])}
    assert compare_metrics(same, {"lr": Stat.of([1.0]), "empty": Stat.of([])}) == []
    near, far = compare_metrics(
        {"kl": Stat.of([1e-9]), "loss": Stat.of([4.0])}, {"kl": Stat.of([2e-9]), "loss": Stat.of([5.0])}
    )
    assert (near.what, near.size) == ("metric kl", pytest.approx(1e-9))
    assert (far.text, far.size) == ("4.0 and 5.0", pytest.approx(0.2))
    # As from a layout with twice the ranks.
    assert compare_metrics({"lr": Stat.of([0.1])}, {"lr": Stat.of([0.1, 0.1])}) == []
    (apart,) = compare_metrics({"age": Stat.of([0.0, 2.0])}, {"age": Stat.of([1.0, 1.0])})
    assert (apart.text, apart.size) == ("least value 0.0 and 1.0", 1.0)
    (missing,) = compare_metrics({}, {"new": Stat.of([1.0])})
    assert missing.text == "was not recorded"


def test_weights() -> None:
    recorded = {"a": ("00", 1.0), "b": ("01", 2.0), "c": ("02", 0.0)}
    assert compare_weights(recorded, dict(recorded)) is None
    found = compare_weights(recorded, recorded | {"b": ("ff", 2.5)})
    assert found is not None and found.text.startswith("1 of 3 tensors differ; norms by at most 2.0e-01")
    assert found.text.endswith("(b)") and found.size == pytest.approx(0.2)
    missing = compare_weights(recorded, {"a": ("00", 1.0)})
    assert missing is not None and missing.size == math.inf
