"""How many right and wrong answers the math reward accepts: the formats' verdicts, and the counting."""

from __future__ import annotations

import io
import json
import random
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = [
    ("sums", "7", "3 + 4 = 7\n#### 7"),
    ("sums", "8", "It is as it is."),
    ("prices", r"\frac{1}{2}", ""),
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [
        {"data_source": source, "reward_model": {"ground_truth": answer}, "extra_info": {"answer": solution}}
        for source, answer, solution in ROWS
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    return tmp_path / "train.parquet"


@pytest.mark.parametrize(
    ("answer", "kind", "value", "parts"),
    [
        ("7", "whole", Fraction(7), ()),
        (r"10,\!080", "whole", Fraction(10080), ()),
        (r"$\frac 34$", "fraction", Fraction(3, 4), ()),
        (r"8.7 \times 10^{8}", "decimal", Fraction(870000000), ()),
        (r"864 \mbox{ inches}^2", "measured", Fraction(864), ()),
        (r"60^\circ", "measured", Fraction(60), ()),
        (r"\text{(B)}", "letter", None, ()),
        (r"\text{odd}", "words", None, ()),
        (r"\left( 3, \frac{\pi}{2} \right)", "tuple", None, ("3", r"\frac{\pi}{2}")),
        ("(0,4]", "interval", None, ("0", "4")),
        (r"\{4,5\}", "set", None, ("4", "5")),
        ("1,-2", "list", None, ("1", "-2")),
        ("2x+1", "formula", None, ()),
        ("(1,1), (3,2)", "list", None, ("(1,1)", "(3,2)")),
    ],
)
def test_kinds_of_references(benchmark_module, answer: str, kind: str, value: Fraction | None, parts: tuple) -> None:
    reference = benchmark_module("answer_references").read_reference(answer)
    assert (reference.kind, reference.value, reference.parts) == (kind, value, parts)


def test_a_near_miss_that_equals_the_reference_is_left_out(benchmark_module) -> None:
    read = benchmark_module("answer_references").read_reference
    wrong = benchmark_module("near_misses").wrong_outputs
    misses = {miss.format for miss in wrong(read("0"), read("0"))}
    assert "one more" in misses
    assert misses.isdisjoint({"sign", "ten times", "another reference"})
    assert not any(each.right for each in wrong(read("0"), None))
    swapped = {miss.format for miss in wrong(read("(2,2)"), None)}
    assert "two elements swapped" not in swapped


def test_responses_are_counted_by_format_and_surprises_are_listed(benchmark_module, prompts: Path) -> None:
    module = benchmark_module("reference_answers")
    rows = list(module.rows_of(prompts))
    drawn = list(module.responses(rows, 2, 1, random.Random(1)))
    assert [len(outputs) for _, outputs in drawn] == [4, 4, 3]
    surprises = io.StringIO()
    tallies = module.tally(iter(drawn), lambda response, answer: float("####" in response), surprises)
    assert sum(tally.rows for tally in tallies.values()) == 11
    found = tallies[module.SOLUTION, True]
    assert (found.rows, found.accepted) == (2, 1)
    listed = [json.loads(line) for line in surprises.getvalue().splitlines()]
    assert (rows[1].place, module.SOLUTION) in {(each["place"], each["format"]) for each in listed}
    lines = list(module.tables(tallies))
    assert lines[-1].startswith("- | the authors' solution | 2 | 1 | 50.00%")
