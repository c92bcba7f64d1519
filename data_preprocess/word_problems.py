"""Word problems with worked solutions: python data_preprocess/word_problems.py --local_dir data/word_problems.

A story begins with a number of things and changes it in one to four steps. A text is in train.parquet or in
test.parquet, never in both, and each number of steps is equally frequent. ``extra_info.answer`` is the worked solution,
for `sft`, and ``extra_info.steps`` the number of its calculations. ``data_source`` ends with that number, so that
validation shows each.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from dagrl.data.prepare.command import exit_on_errors
from dagrl.data.prompt_file import PromptRow, write_prompts

EXTRA_INFO = {"split": pa.string(), "index": pa.int64(), "steps": pa.int64(), "answer": pa.string()}
INSTRUCTION = 'Think step by step, and put the final answer, a number, after "####".'
LONGEST = 4
LARGEST = 400
"""Largest number of a story: the task is the reading, not the arithmetic of long numbers."""

_NAMES = [
    "Ada", "Bruno", "Carla", "Dev", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Liam", "Mona", "Nils",
    "Olga", "Pablo", "Rosa", "Sven", "Tara", "Uma", "Viktor", "Wanda", "Yusuf", "Zora",
]  # fmt: skip
_THINGS = [
    "acorns", "badges", "balloons", "beads", "bottles", "buttons", "candles", "cards", "eggs", "lemons", "magnets",
    "pears", "pens", "ribbons", "seeds", "tiles",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """A sentence of a story, the calculation that it asks for, and the number of things after it."""

    sentence: str
    calculation: str
    total: int


Maker = Callable[[random.Random, str, str, str, int], Step | None]
"""``(random, person, friend, things, total)``: the next step of a story, or None where its numbers do not fit."""


def _find(r: random.Random, who: str, friend: str, things: str, total: int) -> Step:
    more = r.randint(3, 60)
    sentence = r.choice(
        (
            f"Then {who} finds {more} more {things}.",
            f"{friend} gives {who} {more} {things}.",
            f"At the market, {who} buys {more} more {things}.",
        )
    )
    return Step(sentence, f"{total} + {more} = {total + more}", total + more)


def _lose(r: random.Random, who: str, friend: str, things: str, total: int) -> Step | None:
    if total < 5:
        return None
    less = r.randint(2, min(total - 2, 60))
    sentence = r.choice(
        (
            f"{who} gives {less} of the {things} to {friend}.",
            f"On the way home, {who} loses {less} {things}.",
            f"{who} sells {less} {things}.",
        )
    )
    return Step(sentence, f"{total} - {less} = {total - less}", total - less)


def _multiply(r: random.Random, who: str, friend: str, things: str, total: int) -> Step | None:
    times = r.randint(2, 5)
    if total * times > LARGEST:
        return None
    sentence = f"A month later, {who} has {times} times as many {things} as before."
    return Step(sentence, f"{times} * {total} = {times * total}", times * total)


def _share(r: random.Random, who: str, friend: str, things: str, total: int) -> Step | None:
    parts = [part for part in range(2, 10) if total % part == 0 and total > part]
    if not parts:
        return None
    part = r.choice(parts)
    sentence = f"{who} puts the {things} into {part} equal bags and keeps only one of the bags."
    return Step(sentence, f"{total} / {part} = {total // part}", total // part)


def _boxes(r: random.Random, who: str, things: str) -> Step:
    boxes, each = r.randint(3, 12), r.randint(3, 15)
    return Step(
        f"{who} has {boxes} boxes with {each} {things} in each box.", f"{boxes} * {each} = {boxes * each}", boxes * each
    )


def _two_times(r: random.Random, who: str, things: str) -> Step:
    first, second = r.randint(5, 60), r.randint(5, 60)
    sentence = f"{who} collects {first} {things} in the morning and {second} {things} in the afternoon."
    return Step(sentence, f"{first} + {second} = {first + second}", first + second)


_CHANGES: tuple[Maker, ...] = (_find, _lose, _multiply, _share)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its worked solution, and the answer."""

    question: str
    solution: str
    answer: int
    steps: int


def make_problem(r: random.Random, steps: int) -> Problem:
    who, friend = r.sample(_NAMES, 2)
    things = r.choice(_THINGS)
    if r.random() < 0.5:
        total = r.randint(8, 90)
        sentences, made = [f"{who} has {total} {things}."], []
    else:
        first = r.choice((_boxes, _two_times))(r, who, things)
        total, sentences, made = first.total, [first.sentence], [first]
    while len(made) < steps:
        step = r.choice(_CHANGES)(r, who, friend, things, total)
        if step is not None and step.total <= LARGEST:
            made.append(step)
            sentences.append(step.sentence)
            total = step.total
    question = f"{' '.join(sentences)} How many {things} does {who} have now?"
    worked = " ".join(
        f"{_order(number, steps)} {who} has {step.calculation} {things}." for number, step in enumerate(made)
    )
    return Problem(question, f"{worked}\n#### {total}", total, steps)


def _order(number: int, steps: int) -> str:
    if steps == 1:
        return "Now"
    return "First" if number == 0 else "Now" if number == steps - 1 else "Then"


def make_problems(counts: dict[str, int], steps: Sequence[int], seed: int) -> dict[str, list[Problem]]:
    """``counts[split]`` problems of each split, each text once; their lengths take turns through `steps`."""
    r = random.Random(seed)
    seen: set[str] = set()
    splits: dict[str, list[Problem]] = {}
    for split, count in counts.items():
        problems = splits[split] = []
        while len(problems) < count:
            problem = make_problem(r, steps[len(problems) % len(steps)])
            if problem.question not in seen:
                seen.add(problem.question)
                problems.append(problem)
    return splits


def prompts(problems: Sequence[Problem], split: str) -> Iterator[PromptRow]:
    for index, problem in enumerate(problems):
        info = {"split": split, "index": index, "steps": problem.steps, "answer": problem.solution}
        source = f"dagrl/word_problems_{problem.steps}"
        yield PromptRow(source, f"{problem.question} {INSTRUCTION}", str(problem.answer), info)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--local_dir", type=Path, required=True, help="folder to write train.parquet and test.parquet to"
    )
    parser.add_argument("--train", type=_count, default=8000, help="problems in train.parquet; default: %(default)s")
    parser.add_argument("--test", type=_count, default=1000, help="problems in test.parquet; default: %(default)s")
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        choices=range(1, LONGEST + 1),
        default=list(range(1, LONGEST + 1)),
        help="lengths of problems, in equal numbers; default: %(default)s",
    )
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn; default: %(default)s")
    options = parser.parse_args(arguments)
    counts = {"test": options.test, "train": options.train}
    with exit_on_errors(__file__):
        for split, problems in make_problems(counts, options.steps, options.seed).items():
            path = options.local_dir / f"{split}.parquet"
            print(f"{path}: {write_prompts(path, prompts(problems, split), EXTRA_INFO)} rows")


def _count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not 0 < number <= 100_000:
        raise argparse.ArgumentTypeError(f"{text} is not a number of problems from 1 to 100000")
    return number


if __name__ == "__main__":
    main()
