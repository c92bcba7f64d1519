"""The catalogue as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dagrl.algorithms.catalogue.advantages import ESTIMATORS, LENGTHS
from dagrl.algorithms.catalogue.elsewhere import elsewhere
from dagrl.algorithms.catalogue.entry import Chapter, Entry
from dagrl.algorithms.catalogue.others import OTHERS
from dagrl.algorithms.catalogue.policies import AGGREGATIONS, CORRECTIONS, DIVERGENCES, LOSSES

CHAPTERS = (ESTIMATORS, LOSSES, AGGREGATIONS, DIVERGENCES, LENGTHS, CORRECTIONS, OTHERS)

_INTRODUCTION = """\
# Algorithms

Made from the code by `python -m dagrl.algorithms.catalogue`; a test keeps it up to date, and checks that the sources
are those of the code, that templates and tests are there, and that nothing is missing.

A recipe is an estimator, a loss and what they are given: [templates.md](templates.md) says when to take which. Dynamic
sampling is a node of its own, [filter.md](filter.md). What is not here is written in 15 lines beside the pipeline:
[your_own.md](your_own.md).
"""


def document() -> str:
    """The whole document, as Markdown."""
    parts = [_INTRODUCTION]
    for chapter in CHAPTERS:
        head = f"| {chapter.place} | formula | source | template | test | tested against |\n|---|---|---|---|---|---|"
        parts.append("\n".join([f"## {chapter.title}\n\n{chapter.introduction}\n", head, *_rows(chapter), ""]))
        if chapter.notes:
            parts.append(f"{chapter.notes}\n")
    return "\n".join([*parts, elsewhere()])


def place_of_test(entry: Entry) -> tuple[str, str]:
    """File, from the repository's folder, and name of an entry's test."""
    file, _, name = entry.test.partition("::")
    return f"tests/algorithms/test_{file}.py", f"test_{name}"


def _rows(chapter: Chapter) -> Iterator[str]:
    for entry in chapter.entries:
        template = f"[{entry.template}](../dag_templates/{entry.template}.yaml)" if entry.template else ""
        file, name = place_of_test(entry)
        test = f"[{name.removeprefix('test_').replace('_', ' ')}](../{file})"
        cells = (f"`{entry.name}`", f"`{entry.formula}`", _linked(entry.source), template, test, entry.against)
        yield f"| {' | '.join(cells)} |"


def _linked(source: str) -> str:
    """A source with links to arXiv."""
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", source)
