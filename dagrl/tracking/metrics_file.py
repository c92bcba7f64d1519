"""``metrics.jsonl``: one JSON object per step, for tools and tests."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from dagrl.tracking.base import check_in_place, is_kept, naming, replace_text


class MetricsFile:
    """Appends a line per step, written to the file before `log` returns.

    Raises OSError that names the file if it cannot be written.
    """

    def __init__(self) -> None:
        self._path = Path()
        self._file: TextIO | None = None
        self._last = -1

    def start(self, run_dir: Path, config: Mapping[str, object], resumed_step: int | None) -> None:
        """Remove lines after `resumed_step` and a torn last line, then open for appending.

        The last line keeps the number of samples and tokens that the removed steps had generated, as ``lost``.

        Raises ValueError if an earlier line is not a step's metrics.
        """
        self._path = run_dir / "metrics.jsonl"
        with naming(self._path):
            run_dir.mkdir(parents=True, exist_ok=True)
            if self._path.is_file():
                kept = kept_lines(self._path, resumed_step)
                if kept and resumed_step is not None:
                    removed = [json.loads(line) for line in kept_lines(self._path, sys.maxsize)]
                    kept[-1] = _with_lost(kept[-1], [line for line in removed if line["step"] > resumed_step])
                replace_text(self._path, "".join(kept))
                self._last = max((_step_of(line) for line in kept), default=-1)
            self._file = self._path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a step, or add to its line if it has one; NaN and infinity become null."""
        assert self._file is not None, "log before start"
        record = {"step": step, **{name: _json_number(value) for name, value in metrics.items()}}
        with naming(self._path):
            if step <= self._last:
                self._add_to(step, record)
                return
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
            check_in_place(self._path, self._file.fileno())
        self._last = step

    def add_lost(self, metrics: Mapping[str, float]) -> None:
        """Add the samples of unfinished steps to the last line."""
        with naming(self._path):
            if kept := kept_lines(self._path, self._last):
                self.close(ok=True)
                replace_text(self._path, "".join([*kept[:-1], _with_lost(kept[-1], [metrics])]))
                self._file = self._path.open("a", encoding="utf-8")

    def _add_to(self, step: int, record: Mapping[str, float | None]) -> None:
        """Add a checkpoint's validation to the line of its step, or between the lines around it."""
        steps = {_step_of(line): json.loads(line) for line in kept_lines(self._path, self._last)}
        steps[step] = steps.get(step, {}) | record
        self.close(ok=True)
        replace_text(self._path, "".join(f"{json.dumps(steps[number])}\n" for number in sorted(steps)))
        self._file = self._path.open("a", encoding="utf-8")

    def close(self, ok: bool) -> None:
        file, self._file = self._file, None
        if file is not None:
            with naming(self._path):
                file.close()


def _with_lost(line: str, steps: Sequence[Mapping[str, float]]) -> str:
    if not (counts := lost(steps)):
        return line
    record = json.loads(line)
    return json.dumps(record | {name: record.get(name, 0) + count for name, count in counts.items()}) + "\n"


def _json_number(value: float) -> float | None:
    """JSON has no NaN, no infinity and no numpy types."""
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


def _step_of(line: str) -> int:
    return int(json.loads(line)["step"])


def last_step(path: Path) -> int | None:
    """The newest step in the file; None if it holds none or cannot be read."""
    try:
        return max((_step_of(line) for line in kept_lines(path, sys.maxsize)), default=None)
    except (FileNotFoundError, ValueError):
        return None


def kept_lines(path: Path, resumed_step: int | None) -> list[str]:
    """Lines of steps up to `resumed_step`, without a torn last line."""
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = [*file]
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            step = _step_of(line)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: not a step's metrics; remove the line to continue") from error
        if line.endswith("\n") and is_kept(step, resumed_step):
            kept.append(line)
    return kept


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
