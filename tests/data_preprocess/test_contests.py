"""aime.py and amc.py: a file for evaluation only."""

from __future__ import annotations

import pytest

ROWS = [
    {"problem": "How many?", "answer": 0.0, "url": "https://x"},
    {"problem": "How far?", "answer": "025"},
    {"problem": "How far?", "answer": 25},
    {"problem": "How far?", "answer": "025", "solution": "So."},
    {"problem": "How?", "answer": None},
]


@pytest.mark.parametrize("name", ["aime", "amc"])
@pytest.mark.parametrize("place", ["{}_DOT_json", "test__{}_DOT_json", "test_DOT_jsonl", "data__train-0_DOT_parquet"])
def test_a_test_file_is_written(originals, prepared, capsys, name: str, place: str) -> None:
    rows = ROWS
    if "parquet" in place:
        rows = [{**row, "answer": None if row["answer"] is None else str(row["answer"])} for row in ROWS]
    written = prepared(name, originals(**{place.format(name): rows}))
    assert list(written) == ["test"]
    truths = [row["reward_model"]["ground_truth"] for row in written["test"]]
    assert truths == (["0.0", "025"] if "parquet" in place else ["0", "025"])
    assert {row["data_source"] for row in written["test"]} == {name}
    assert written["test"][0]["extra_info"]["url"] == "https://x"
    out = capsys.readouterr().out
    assert "dropped 1: asked before, with another answer; dropped 1: asked before; dropped 1: no answer" in out


def test_there_is_no_train_split(originals, prepared, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        prepared("aime", originals(aime_DOT_json=ROWS), "--splits", "train")
    assert stopped.value.code == 2
