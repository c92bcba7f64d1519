"""Pictures of digits, with the digit as the answer: python data_preprocess/digits.py --local_dir data/digits.

A toy task for models that see. Each picture of 16 x 16 pixels is drawn anew, at a random place in random colours, so
that no picture of test.parquet is one of train.parquet.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

from dagrl.data.prepare.command import exit_on_errors
from dagrl.data.prompt_file import PromptRow, write_prompts

SIDE, SCALE = 16, 2
GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
"""Rows of pixels of each digit, 5 x 7."""
COLUMNS = {"images": pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))}


def drawn(digit: int, random: np.random.Generator) -> bytes:
    glyph = np.array([[int(pixel) for pixel in row] for row in GLYPHS[digit].split()])
    glyph = np.kron(glyph, np.ones((SCALE, SCALE), dtype=int))
    height, width = glyph.shape
    top, left = random.integers(0, SIDE - height + 1), random.integers(0, SIDE - width + 1)
    picture = np.tile(random.integers(0, 80, 3), (SIDE, SIDE, 1))
    picture[top : top + height, left : left + width][glyph > 0] = random.integers(176, 256, 3)
    file = io.BytesIO()
    Image.fromarray(picture.astype(np.uint8)).save(file, format="PNG")
    return file.getvalue()


def prompts(count: int, split: str, random: np.random.Generator) -> Iterator[PromptRow]:
    """`count` pictures, as many of each digit."""
    for number in range(count):
        digit = number % len(GLYPHS)
        image = {"bytes": drawn(digit, random), "path": None}
        extra_info = {"split": split, "index": number}
        yield PromptRow("dagrl/digits", "<image>=", str(digit), extra_info, columns={"images": [image]})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--local_dir", type=Path, required=True, help="folder to write train.parquet and test.parquet to"
    )
    parser.add_argument("--train", type=int, default=2000, help="pictures in train.parquet; default: %(default)s")
    parser.add_argument("--test", type=int, default=200, help="pictures in test.parquet; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of the drawing, 0 or above; default: %(default)s")
    options = parser.parse_args(arguments)
    info = {"split": pa.string(), "index": pa.int64()}
    with exit_on_errors(__file__):
        for number, (split, count) in enumerate({"train": options.train, "test": options.test}.items()):
            path, random = options.local_dir / f"{split}.parquet", np.random.default_rng([options.seed, number])
            rows = write_prompts(path, prompts(count, split, random), info, COLUMNS, rows_per_group=512)
            print(f"{path}: {rows} rows")


if __name__ == "__main__":
    main()
