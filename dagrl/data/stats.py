"""Mergeable statistics: metrics of shards and ranks are merged into metrics of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Stat:
    """Count, sum, sum of squares and extremes of some numbers."""

    count: float
    total: float
    squares: float
    low: float
    high: float

    @staticmethod
    def of(values: np.ndarray | Iterable[float]) -> Stat:
        """Statistics of an array of any shape; the mean of an empty one is NaN."""
        array = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float64).ravel()
        if array.size == 0:
            return Stat(0, 0.0, 0.0, math.inf, -math.inf)
        return Stat(
            array.size, float(array.sum()), float((array * array).sum()), float(array.min()), float(array.max())
        )

    @staticmethod
    def weighted(total: float, count: float) -> Stat:
        """A mean from numerator and denominator; its `std` is undefined."""
        if not count:
            # An unknown mean as NaN would make every merge NaN.
            return Stat.of(())
        mean = total / count
        return Stat(count, total, mean * total, mean, mean)

    def __add__(self, other: Stat) -> Stat:
        return Stat(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            min(self.low, other.low),
            max(self.high, other.high),
        )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def std(self) -> float:
        """Standard deviation of the population; NaN without values."""
        if not self.count:
            return math.nan
        return math.sqrt(max(0.0, self.squares / self.count - self.mean**2))


def merge(parts: Iterable[Mapping[str, Stat]]) -> dict[str, Stat]:
    merged: dict[str, Stat] = {}
    for part in parts:
        for name, stat in part.items():
            merged[name] = merged[name] + stat if name in merged else stat
    return merged
