"""Rows of several teachers: who computes which, and how they become one column."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dagrl.data.batch import Batch, Column
from dagrl.ops.base import OpInput
from dagrl.ops.logprob import logprob
from dagrl.ops.merge import merge

NAN = math.nan
MATHS = [[-1, -2], [NAN], [], [NAN, NAN]]
CODE = [[-3, -4], [-5], [], [NAN, NAN]]


def merged(bench, columns: dict[str, Any], taught: float = 1.0, **options: Any) -> dict[str, Column]:
    batch = bench.batch([4, 5, 6, 7], data_set=["maths", "code", "code", "chat"])
    batch = batch.with_columns(columns)
    nodes = {"merged": {"op": "merge", "columns": list(columns), **options}}
    (output,) = merge([OpInput(2, batch)], bench.context("merged", nodes=nodes))
    assert output.stats["distillation/taught_fraction"].mean == taught
    assert (output.shards, output.rows.tolist()) == ((2,), [4, 5, 6, 7])
    return dict(output.columns)


def test_the_first_column_that_has_a_row_gives_it(bench) -> None:
    columns = {"maths": Column.ragged(MATHS, "float32"), "code": Column.ragged(CODE, "float32")}
    found = merged(bench, columns, taught=0.75, uncovered="skip")
    assert found["teacher_logprob"].values.tolist()[:3] == [-1, -2, -5]
    assert np.isnan(found["teacher_logprob"].values[3:]).all()
    assert found["teacher_logprob"].lengths.tolist() == [2, 1, 0, 2]
    assert found["teacher_mask"].values.tolist() == [1, 1, 1, 0]


def test_a_step_without_any_taught_row_has_the_metric_0(bench) -> None:
    columns = {"maths": Column.ragged([[NAN]] * 4, "float32")}
    assert merged(bench, columns, taught=0.0, uncovered="skip")["teacher_mask"].values.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "write", ["own_logprob", {"teacher_logprob": "own_logprob"}, {"teacher_mask": "own_mask"}, None]
)
def test_a_merge_that_skips_rows_has_any_name(bench, write: Any) -> None:
    columns = {"maths": Column.ragged(MATHS, "float32"), "code": Column.ragged(CODE, "float32")}
    own = write if isinstance(write, str) else "teacher_logprob"
    assert list(merged(bench, columns, taught=0.75, uncovered="skip", write=write)) == [own, "teacher_mask"]


def test_a_row_that_no_teacher_covers_is_named_with_its_source(bench) -> None:
    columns = {"maths": Column.ragged(MATHS, "float32"), "code": Column.ragged(CODE, "float32")}
    with pytest.raises(ValueError, match="`maths` and `code` has the sample 7 of the source `chat`"):
        merged(bench, columns)


def test_candidates_are_merged_by_token_and_integers_lack_rows_below_zero(bench) -> None:
    offsets = np.array([0, 2, 3, 3, 5])
    ids = np.array([[1, 2], [3, 4], [-1, -1], [-1, -1], [-1, -1]], dtype=np.int32)
    others = np.array([[9, 9], [9, 9], [5, 6], [7, 8], [0, 0]], dtype=np.int32)
    found = merged(bench, {"one": Column(ids, offsets), "two": Column(others, offsets)}, write="teacher_topk_ids")
    assert found["teacher_topk_ids"].values.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [0, 0]]
    assert found["teacher_topk_ids"].values.dtype == np.int32


def test_a_row_with_one_missing_number_is_not_another_teachers(bench) -> None:
    columns = {
        "maths": Column.ragged([[-1, NAN], [-1], [], [-1, -1]], "float32"),
        "code": Column.ragged(CODE, "float32"),
    }
    assert np.isnan(merged(bench, columns)["teacher_logprob"].values[1])


class Scorer:
    """Gives each token the negative number of its row in the batch, from 1."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def logprobs(self, batch: Batch, **_: Any) -> Column:
        self.rows.append(batch.rows.tolist())
        return Column.ragged(
            [[-1.0 - number] * length for number, length in enumerate(batch["response_tokens"].lengths)], "float32"
        )


OWN = """
def long(response_tokens, answer): return [len(a) > 1 and bool(b) for a, b in zip(response_tokens, answer)]
def wrong(response_tokens): return [1, 0, 1, 0]
"""


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [
        (None, [2, 3, 5, 8]),
        ({"data_set": ["maths"]}, [2, 5]),
        ({"data_set": ["maths", "code"]}, [2, 3, 5]),
        ({"data_set": ["maths"], "group_id": [4]}, [5]),
        ({"data_set": ["none"]}, []),
        ("choice:long", [3, 8]),
    ],
)
def test_only_chosen_rows_are_computed(bench, rows: Any, chosen: list[int]) -> None:
    bench.write_module("choice", OWN)
    batch = bench.batch(
        [2, 3, 5, 8],
        prompt_tokens=["1=", "2=", "3=", "4="],
        response_tokens=["1", "22", "3", "44"],
        data_set=["maths", "code", "maths", "chat"],
        group_id=[3, 3, 4, 4],
        answer=["a", "b", "c", "d"],
    )
    engine = Scorer()
    nodes = {"old": {"op": "logprob", "engine": "actor", "rows": rows}}
    (output,) = logprob([OpInput(0, batch)], bench.context("old", engine=engine, nodes=nodes))
    assert engine.rows == [chosen]
    column = output.columns["logprob"]
    assert column.lengths.tolist() == [1, 2, 1, 2]
    given = [row for row, number in zip([2, 3, 5, 8], range(4), strict=True) if not np.isnan(column[number]).any()]
    assert given == chosen
    assert [column[[2, 3, 5, 8].index(row)][0] for row in chosen] == [-1.0 - each for each in range(len(chosen))]


@pytest.mark.parametrize(
    ("rows", "words"),
    [("choice_2:wrong", "one for each row"), ({"response_tokens": [1]}, "name another column")],
)
def test_a_choice_that_is_none_is_refused(bench, rows: Any, words: str) -> None:
    bench.write_module("choice_2", OWN)
    batch = bench.batch([1, 2, 3, 4], prompt_tokens=["1="] * 4, response_tokens=["1"] * 4)
    nodes = {"old": {"op": "logprob", "engine": "actor", "rows": rows}}
    with pytest.raises(ValueError, match=words):
        list(logprob([OpInput(0, batch)], bench.context("old", engine=Scorer(), nodes=nodes)))
