r"""How many reference answers the math reward confirms, over all rows of prompt files that data_preprocess/ has made.

    python data_preprocess/gsm8k.py --local_dir data/gsm8k --source ORIGINALS
    python benchmarks/reference_answers.py data/gsm8k/train.parquet data/gsm8k/test.parquet --list unconfirmed.jsonl

Each row is scored three times, as a run would: the authors' worked solution (``extra_info.answer``, where there is one)
and the bare answer in a ``\boxed{}`` have to get 1.0, the boxed answer of a following row, written otherwise, 0.0.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any, TextIO

import pyarrow.parquet as pq

from dagrl.rewards.registry import load_reward
from dagrl.rewards.score import Samples, score

_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Row:
    """What is scored of a row."""

    place: str
    source: str
    answer: str
    solution: str
    other: str
    """The next answer in the file that is written otherwise."""


@dataclass(slots=True)
class Tally:
    """How the rows of a source were scored one way."""

    rows: int = 0
    right: int = 0
    refused: int = 0
    """Rows whose reference answer holds nothing to compare with."""
    seconds: float = 0.0


WAYS: dict[str, Callable[[Row], str]] = {
    "solution": lambda row: row.solution,
    "boxed": lambda row: rf"\boxed{{{row.answer}}}",
    "other": lambda row: rf"\boxed{{{row.other}}}",
}
"""What stands for the response."""


def main() -> None:
    """Score all rows and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="parquet files in verl's schema")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="what stands for the response")
    parser.add_argument(
        "--list", type=Path, help="write rows that were not scored as they should be here, as JSON lines"
    )
    args = parser.parse_args()
    with args.list.open("w") if args.list else Path("/dev/null").open("w") as unexpected:
        tallies = {way: tally(args.files, way, unexpected) for way in args.ways}
    print("source way rows right share refused ms/row")
    for way, sources in tallies.items():
        for source, found in sources.items():
            share = found.right / found.rows
            per_row = 1000 * found.seconds / found.rows
            print(f"{source} {way} {found.rows} {found.right} {share:.4%} {found.refused} {per_row:.2f}")


def tally(files: Iterable[Path], way: str, unexpected: TextIO) -> dict[str, Tally]:
    """Source -> how its rows were scored; those that should have been scored otherwise go to `unexpected`."""
    tallies: dict[str, Tally] = {}
    rows = (row for file in files for row in rows_of(file) if WAYS[way](row))
    for some in batched(rows, _AT_ONCE):
        start = time.perf_counter()
        scores = score(load_reward("math"), samples_of(some, way), args={}, on_error=-1.0)
        each = (time.perf_counter() - start) / len(some)
        for row, reward in zip(some, scores.rewards.tolist(), strict=True):
            found = tallies.setdefault(row.source, Tally())
            found.rows += 1
            found.right += reward == 1.0
            found.refused += reward < 0.0
            found.seconds += each
            if (reward == 1.0) == (way == "other"):
                told = {"place": row.place, "way": way, "reward": reward, "answer": row.answer}
                unexpected.write(json.dumps(told | {"response": WAYS[way](row)}, ensure_ascii=False) + "\n")
    return tallies


def rows_of(file: Path) -> Iterator[Row]:
    """The rows of a file, in order."""
    columns = ["data_source", "reward_model.ground_truth", "extra_info.answer"]
    with pq.ParquetFile(file) as parquet:
        records: list[dict[str, Any]] = parquet.read(columns=columns).to_pylist()
    answers = [record["reward_model"]["ground_truth"] for record in records]
    for number, (record, answer) in enumerate(zip(records, answers, strict=True)):
        others = (answers[(number + step) % len(answers)] for step in range(1, len(answers)))
        yield Row(
            f"{file.parent.name}/{file.name} row {number}",
            record["data_source"],
            answer,
            (record["extra_info"] or {}).get("answer") or "",
            next((other for other in others if other.strip() != answer.strip()), ""),
        )


def samples_of(rows: Sequence[Row], way: str) -> Samples:
    """The rows as a reward is told of them."""
    nothing = [""] * len(rows)
    return Samples(
        sample_id=list(range(len(rows))),
        prompt=nothing,
        response=[WAYS[way](row) for row in rows],
        answer=[row.answer for row in rows],
        data_source=[row.source for row in rows],
        extra_info=[{}] * len(rows),
    )


if __name__ == "__main__":
    main()
