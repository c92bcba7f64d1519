"""What the doctor says: a line for each thing looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def report(sections: Iterable[tuple[str, Sequence[Line]]]) -> tuple[str, int]:
    """All lines by section, with a last one that counts; and the exit code."""
    rows: list[str] = []
    lines: list[Line] = []
    for title, found in sections:
        rows.append(title)
        rows += [f"  {line.verdict.value:<8} {line.name:<22} {line.text}".rstrip() for line in found]
        lines += found
    lacking = sum(line.verdict is Verdict.MISSING for line in lines)
    hints = sum(line.verdict is Verdict.HINT for line in lines)
    rows.append(f"{lacking} missing, {hints} hint{'' if hints == 1 else 's'}")
    return "\n".join(rows) + "\n", 1 if lacking else 0
