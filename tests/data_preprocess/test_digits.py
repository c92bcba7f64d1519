"""digits.py: each digit as often, other pictures in each file, the same files for the same seed."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow.parquet as pq
from PIL import Image


def test_each_digit_is_drawn(load_script, tmp_path: Path) -> None:
    digits = load_script("digits")
    for folder in ("a", "b"):
        digits.main(["--local_dir", str(tmp_path / folder), "--train", "30", "--test", "20"])
    train, test = (pq.read_table(tmp_path / "a" / f"{split}.parquet").to_pylist() for split in ("train", "test"))
    assert sorted(row["reward_model"]["ground_truth"] for row in train) == sorted("0123456789" * 3)
    pictures = [row["images"][0]["bytes"] for row in (*train, *test)]
    assert len(set(pictures)) == 50
    assert all(Image.open(io.BytesIO(picture)).size == (16, 16) for picture in pictures)
    assert train == pq.read_table(tmp_path / "b" / "train.parquet").to_pylist()
