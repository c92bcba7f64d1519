"""What the doctor says: a line for each thing looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """How a thing is."""

    OK = "ok"
    HINT = "hint"
    """Works, or is not always needed; better otherwise."""
    MISSING = "missing"
    """Runs will fail."""


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was looked at."""

    verdict: Verdict
    name: str
    text: str


def ok(name: str, text: str) -> Line:
    """A thing that is as it should be."""
    return Line(Verdict.OK, name, text)


def hint(name: str, text: str) -> Line:
    """A thing that could be better."""
    return Line(Verdict.HINT, name, text)


def missing(name: str, text: str) -> Line:
    """A thing without which runs fail."""
    return Line(Verdict.MISSING, name, text)


def report(sections: Iterable[tuple[str, Iterable[Line]]], say: Callable[[str], None]) -> int:
    """Say each line as it is found, by section, and a last one that counts them; returns the exit code."""
    found: Counter[Verdict] = Counter()
    for title, lines in sections:
        say(title)
        for line in lines:
            say(f"  {line.verdict.value:<8} {line.name:<22} {line.text}".rstrip())
            found[line.verdict] += 1
    lacking, hints = found[Verdict.MISSING], found[Verdict.HINT]
    say(f"{lacking} missing, {hints} hint{'' if hints == 1 else 's'}")
    return 1 if lacking else 0
