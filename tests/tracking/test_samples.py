"""Which samples of a validation are shown."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagrl.tracking import read_samples


@pytest.fixture
def written(tmp_path: Path):
    def write(**sets: int) -> Path:
        rows = [
            {
                "sample_id": row,
                "data_set": name,
                "prompt": f"{name} {row}",
                "response": "4",
                "answer": "4",
                "reward": 1.0,
            }
            for name, count in sets.items()
            for row in range(count)
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "step_1_val.parquet")
        return tmp_path / "step_1_val.parquet"

    return write


def prompts(path: Path, limit: int) -> list[str]:
    table = read_samples(path, limit)
    assert table is not None
    assert table.columns == ("data_set", "prompt", "response", "answer", "reward")
    return [row[1] for row in table.rows]


def test_rows_are_spread_over_sets_and_prompts(written) -> None:
    path = written(sums=8, doubles=4)
    assert prompts(path, 4) == ["sums 0", "sums 4", "doubles 0", "doubles 2"]
    assert prompts(path, 5) == ["sums 0", "sums 2", "sums 5", "doubles 0", "doubles 2"]


def test_a_small_set_leaves_room_for_the_others(written) -> None:
    assert prompts(written(sums=1, doubles=9), 4) == ["sums 0", "doubles 0", "doubles 3", "doubles 6"]
    assert prompts(written(doubles=9, sums=1), 4) == ["doubles 0", "doubles 3", "doubles 6", "sums 0"]


def test_more_than_there_are_are_all(written) -> None:
    assert len(prompts(written(sums=3), 100)) == 3


def test_more_sets_than_rows_are_cut(written) -> None:
    assert len(prompts(written(a=3, b=3, c=3), 2)) == 2


def test_no_file_or_no_rows_wanted_is_no_table(written, tmp_path: Path) -> None:
    assert read_samples(tmp_path / "step_2_val.parquet", 4) is None
    assert read_samples(written(sums=3), 0) is None
