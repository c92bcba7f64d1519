"""The account of samples in metrics: names, sums over a run, and what lost steps had generated.

generated = trained + stale + filtered + failed + unused + carried + lost
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ENDS = ("trained", "stale", "filtered", "failed", "unused")
"""Ends of samples, as steps report them."""
_GENERATED = re.compile(r"(?:(?P<rollout>[^/]+)/)??(?:train/(?P<source>[^/]+)/)?samples/generated")


@dataclass(frozen=True, slots=True)
class Account:
    """Sums over a run, in samples and in tokens."""

    rollout: str
    """Empty for the leading rollout."""
    source: str
    """Empty for all sources together."""
    samples: Mapping[str, int]
    """``generated`` and each end; also ``carried``, still open at the end, and ``lost``, of repeated steps."""
    tokens: Mapping[str, int]

    @property
    def title(self) -> str:
        """The rollout and the source; empty for the whole of the leading rollout."""
        return ", ".join(filter(None, (self.rollout, self.source)))


def accounts(steps: Iterable[Mapping[str, float]]) -> list[Account]:
    """The account of each rollout and source in the lines of metrics.jsonl."""
    sums: dict[str, float] = {}
    for line in steps:
        for name, value in line.items():
            if "samples/" in name or "tokens/" in name:
                sums[name] = sums.get(name, 0) + value
    entries = []
    for name in sums:
        if part := _GENERATED.fullmatch(name):
            prefix = name.removesuffix("samples/generated")
            samples, tokens = (_added(sums, f"{prefix}{unit}/") for unit in ("samples", "tokens"))
            entries.append(Account(part["rollout"] or "", part["source"] or "", samples, tokens))
    return entries


def _added(sums: Mapping[str, float], prefix: str) -> dict[str, int]:
    counts = {end: round(sums.get(prefix + end, 0)) for end in (*ENDS, "lost")}
    carried = round(sums.get(f"{prefix}carried_out", 0) - sums.get(f"{prefix}carried_in", 0))
    lost = counts.pop("lost")
    return {"generated": round(sums[f"{prefix}generated"]) + lost, **counts, "carried": carried, "lost": lost}


def lost(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Counts of the samples and tokens that lost steps have generated, for the line before them."""
    counts: dict[str, float] = {}
    for line in steps:
        for name, value in line.items():
            prefix, _, last = name.rpartition("/")
            if prefix.endswith(("samples", "tokens")) and last in ("generated", "lost"):
                counts[f"{prefix}/lost"] = counts.get(f"{prefix}/lost", 0) + value
    return {name: count for name, count in counts.items() if count}
