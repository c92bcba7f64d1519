r"""How many right answers the math reward accepts, and how many wrong ones, over the reference answers of prompt files.

    python data_preprocess/gsm8k.py --local_dir data/gsm8k --source ORIGINALS
    python benchmarks/reference_answers.py data/gsm8k/train.parquet data/gsm8k/test.parquet --list unexpected.jsonl

For each reference answer, `answer_formats` writes right responses in many formats and `near_misses` wrong ones,
so that each verdict is known by construction. ``--right`` and ``--wrong`` of them are drawn for each row, so that all
references and all formats have their turn. The authors' own worked solutions (``extra_info.answer``) are scored beside
them: they are no verdict, as some do not end with their answer.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import pyarrow.parquet as pq
from answer_formats import Output, right_outputs
from answer_references import Reference, read_reference
from near_misses import wrong_outputs

from dagrl.rewards.math import math_reward


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a prompt file, as far as it is used."""

    place: str
    source: str
    answer: str
    solution: str


@dataclass(slots=True)
class Tally:
    """How the responses of a format were scored."""

    rows: int = 0
    accepted: int = 0
    milliseconds: list[float] = field(default_factory=list)

    def add(self, accepted: bool, milliseconds: float) -> None:
        """Count one response."""
        self.rows += 1
        self.accepted += accepted
        self.milliseconds.append(milliseconds)


Reward = Callable[[str, str], float]
SOLUTION = "the authors' solution"


def main() -> None:
    """Score the responses and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="parquet files in verl's schema")
    parser.add_argument("--right", type=int, default=4, help="right responses a row; default: %(default)s")
    parser.add_argument("--wrong", type=int, default=2, help="wrong responses a row; default: %(default)s")
    parser.add_argument("--every", type=int, default=1, help="only every so many rows; default: all")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn; default: %(default)s")
    parser.add_argument(
        "--list", type=Path, help="write responses with another verdict than theirs here, as JSON lines"
    )
    args = parser.parse_args()
    rows = [row for file in args.files for row in rows_of(file)]
    math_reward("1", "1")
    with args.list.open("w") if args.list else Path("/dev/null").open("w") as unexpected:
        drawn = responses(rows, args.right, args.wrong, random.Random(args.seed))
        tallies = tally((each for index, each in enumerate(drawn) if index % args.every == 0), math_reward, unexpected)
    print("\n".join(tables(tallies)))


def rows_of(file: Path) -> Iterator[Row]:
    """The rows of a file, in order."""
    columns = ["data_source", "reward_model.ground_truth", "extra_info.answer"]
    with pq.ParquetFile(file) as parquet:
        records: list[dict[str, Any]] = parquet.read(columns=columns).to_pylist()
    for number, record in enumerate(records):
        yield Row(
            f"{file.parent.name}/{file.name} row {number}",
            record["data_source"],
            record["reward_model"]["ground_truth"],
            (record["extra_info"] or {}).get("answer") or "",
        )


def responses(rows: Sequence[Row], right: int, wrong: int, draw: random.Random) -> Iterator[tuple[Row, list[Output]]]:
    """Each row with the responses that are drawn for it; formats that were drawn least come first."""
    references = [read_reference(row.answer) for row in rows]
    by_kind: dict[str, list[Reference]] = {}
    for reference in references:
        by_kind.setdefault(reference.kind, []).append(reference)
    times: dict[tuple[str, bool], int] = {}

    def choose(outputs: Iterator[Output], count: int) -> list[Output]:
        candidates = list(outputs)
        draw.shuffle(candidates)
        # The first is of the rarest format so far, the others are of any.
        candidates.sort(key=lambda output: times.get((output.format, output.right), 0))
        chosen = candidates[:1] + draw.sample(candidates[1:], min(max(count - 1, 0), len(candidates) - 1))
        for output in chosen[:count]:
            times[output.format, output.right] = times.get((output.format, output.right), 0) + 1
        return chosen[:count]

    for row, reference in zip(rows, references, strict=True):
        other = draw.choice(by_kind[reference.kind])
        chosen = choose(right_outputs(reference), right) + choose(wrong_outputs(reference, other), wrong)
        solution = [Output(SOLUTION, row.solution, right=True)] if row.solution else []
        yield row, chosen + solution


def tally(
    rows: Iterator[tuple[Row, list[Output]]], reward: Reward, unexpected: TextIO
) -> dict[tuple[str, bool], Tally]:
    """(Format, verdict) -> how its responses were scored; those with another verdict than theirs go to `unexpected`."""
    tallies: dict[tuple[str, bool], Tally] = {}
    for row, outputs in rows:
        for output in outputs:
            start = time.perf_counter()
            try:
                got: float | str = reward(output.text, row.answer)
            except ValueError as error:
                got = str(error)
            milliseconds = 1000 * (time.perf_counter() - start)
            accepted = got == 1.0
            tallies.setdefault((output.format, output.right), Tally()).add(accepted, milliseconds)
            if accepted != output.right:
                told = {"place": row.place, "format": output.format, "right": output.right, "reward": got}
                told |= {"answer": row.answer, "response": output.text, "ms": round(milliseconds, 1)}
                unexpected.write(json.dumps(told, ensure_ascii=False) + "\n")
    return tallies


def tables(tallies: dict[tuple[str, bool], Tally]) -> Iterator[str]:
    """A line for each format, the worst ones first, and one for all of a verdict."""
    yield "verdict | format | responses | accepted | share | ms median | ms p99"
    verdicts = {
        verdict: {name: found for (name, right), found in tallies.items() if right == verdict and name != SOLUTION}
        for verdict in (True, False)
    }
    for right, formats in verdicts.items():
        name = "right" if right else "wrong"
        everything = Tally()
        for found in formats.values():
            everything.rows += found.rows
            everything.accepted += found.accepted
            everything.milliseconds += found.milliseconds
        by_share = sorted(formats.items(), key=lambda each: each[1].accepted / each[1].rows, reverse=not right)
        for label, found in [*by_share, ("all", everything)]:
            yield _line(name, label, found)
    if (SOLUTION, True) in tallies:
        yield _line("-", SOLUTION, tallies[SOLUTION, True])


def _line(verdict: str, label: str, found: Tally) -> str:
    if not found.rows:
        return f"{verdict} | {label} | 0"
    worst = statistics.quantiles(found.milliseconds, n=100)[98] if found.rows > 1 else found.milliseconds[0]
    median = statistics.median(found.milliseconds)
    share = found.accepted / found.rows
    return f"{verdict} | {label} | {found.rows} | {found.accepted} | {share:.2%} | {median:.2f} | {worst:.1f}"


if __name__ == "__main__":
    main()
