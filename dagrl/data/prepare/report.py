"""What became of the rows of a split: read, kept, dropped and why, and how long the prompts are."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dagrl.config.errors import counted

_SECONDS_BETWEEN_LINES = 10.0
_BAR = 40


@dataclass(slots=True)
class SplitReport:
    """Counts of one split, filled in row by row."""

    unit: str
    """What lengths are counted in: characters or tokens."""
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows by the reason."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Kept prompts by their length."""

    def as_dict(self) -> dict[str, Any]:
        """All of it, for report.json."""
        return {
            "read": self.read,
            "kept": self.kept,
            "dropped": dict(self.dropped.most_common()),
            "prompt_length": {
                "unit": self.unit,
                **self.quantiles(),
                "histogram": [{"from": low, "below": 2 * low, "rows": rows} for low, rows in self.bins()],
            },
        }

    def quantiles(self) -> dict[str, int]:
        """Shortest, median, 95 of 100, and longest prompt; empty without prompts."""
        if not self.kept:
            return {}
        ordered = sorted(self.lengths.items())
        shares = {"shortest": 0.0, "median": 0.5, "p95": 0.95, "longest": 1.0}
        return {name: _at(ordered, share * (self.kept - 1)) for name, share in shares.items()}

    def bins(self) -> list[tuple[int, int]]:
        """Prompts by the power of two below their length, without gaps: [(low, prompts of low..2*low-1)]."""
        if not self.kept:
            return []
        counts: Counter[int] = Counter()
        for length, rows in self.lengths.items():
            counts[max(length, 1).bit_length() - 1] += rows
        return [(1 << power, counts[power]) for power in range(min(counts), max(counts) + 1)]

    def lines(self) -> list[str]:
        """Text to print below the line with the file's name."""
        quantiles = ", ".join(f"{name} {length:,}" for name, length in self.quantiles().items())
        lines = [f"  {self.read:,} read; prompt length in {self.unit}: {quantiles}"]
        most = max((rows for _, rows in self.bins()), default=0)
        width = max((len(f"{2 * low - 1:,}") for low, _ in self.bins()), default=0)
        for low, rows in self.bins():
            bar = "#" * -(-rows * _BAR // most)
            lines.append(f"  {low:>{width},} to {2 * low - 1:>{width},}  {rows:>9,}  {bar}".rstrip())
        return lines

    def drops(self) -> str:
        """The drops, for the line with the file's name."""
        return "".join(f"; dropped {rows:,}: {reason}" for reason, rows in self.dropped.items())


def _at(ordered: list[tuple[int, int]], rank: float) -> int:
    """The length at a rank, counted from 0, of lengths with their counts in rising order."""
    seen = 0
    for length, rows in ordered:
        seen += rows
        if rank < seen:
            return length
    return ordered[-1][0]


class ProgressLines:
    """Says on stderr how far a split has come: now and then, so that logs stay short."""

    def __init__(self, split: str) -> None:
        self._split = split
        self._start = self._said = time.monotonic()

    def step(self, read: int) -> None:
        """Called with each row."""
        now = time.monotonic()
        if now - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = now
            print(f"{self._split}: {counted(read, 'row')}, {read / (now - self._start):,.0f} a second", file=sys.stderr)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._start
