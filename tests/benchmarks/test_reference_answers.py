"""How many reference answers the math reward confirms: the counting, on rows whose scores are known."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = [
    ("sums", "7", "3 + 4 = 7\n#### 7"),
    ("sums", "8", "It is as it is."),
    ("prices", r"\frac{1}{2}", ""),
    ("prices", "", r"\boxed{1}"),
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [
        {"data_source": source, "reward_model": {"ground_truth": answer}, "extra_info": {"answer": solution}}
        for source, answer, solution in ROWS
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    return tmp_path / "train.parquet"


def test_rows_are_counted_by_source_and_those_that_surprise_are_listed(benchmark_module, prompts: Path) -> None:
    module = benchmark_module("reference_answers")
    surprises = io.StringIO()
    found = module.tally([prompts], "solution", surprises)
    counts = {source: (tally.rows, tally.right, tally.refused) for source, tally in found.items()}
    assert counts == {"sums": (2, 1, 0), "prices": (1, 0, 1)}
    listed = [json.loads(line) for line in surprises.getvalue().splitlines()]
    assert [(each["place"].split("/")[-1], each["reward"]) for each in listed] == [
        ("train.parquet row 1", 0.0),
        ("train.parquet row 3", -1.0),
    ]
    assert [row.other for row in module.rows_of(prompts)] == ["8", r"\frac{1}{2}", "", "7"]
