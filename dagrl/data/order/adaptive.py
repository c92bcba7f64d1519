"""An order by what the policy can do: prompts of medium pass rates first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dagrl.config.share import ALL, Share
from dagrl.data.order.passes import Passes, Window
from dagrl.data.order.sampler import Outcome, State

_COLUMNS = ("row", "rate", "advantage", "seen", "waiting")


@dataclass(frozen=True, slots=True)
class AdaptiveRules:
    """How likely a row is drawn: with weight 1 in the band and before its first outcome."""

    low: float
    high: float
    """The band of pass rates, both ends included."""
    skip_solved_for: int
    """Steps for which a row above the band is not drawn."""
    priority: Literal["advantage", "pass_rate"]
    """Weight of a row below the band: |advantage|, or 1 - pass rate."""
    floor: float


class Adaptive:
    """Draws rows without replacement within a take, by weights that follow from their last outcomes."""

    def __init__(
        self, rows: int, window: Window, rules: AdaptiveRules, seed: tuple[int, ...], share: Share = ALL
    ) -> None:
        """Rows without an outcome come in the order of the first pass."""
        self.passed = 0
        self._rows, self._rules, self._seed = rows, rules, seed
        self._new, self._share = Passes(rows, window, share), share
        self._draws = 0
        self._index: dict[int, int] = {}
        """Row -> its place in the table of rows that were taken."""
        self._table = {name: np.zeros(0) for name in _COLUMNS}
        """The state of each row: its pass rate and |advantage|, NaN before the first outcome; the step of the outcome;
        and whether it was taken since."""

    def take(self, count: int, unusable: Collection[int], step: int) -> list[int]:
        draw = np.random.default_rng([*self._seed, self._draws])
        self._draws += 1
        # As in passes over the rows, those of other shares included.
        self.passed += count * self._share.of
        taken: list[int] = []
        excluded = set(unusable)
        while len(taken) < count:
            rows = self._drawn(count - len(taken), excluded, step, draw)
            if not rows and excluded == set(unusable):
                raise ValueError("data.train: no prompt of a source fits max_prompt_tokens; raise that")
            # Without further rows the take is larger than the source, and begins again.
            excluded = excluded.union(rows) if rows else set(unusable)
            taken += rows
        return taken

    def observe(self, step: int, outcomes: Mapping[int, Outcome]) -> None:
        places = [self._index[row] for row in outcomes if row in self._index]
        known = [outcome for row, outcome in outcomes.items() if row in self._index]
        self._table["rate"][places] = [_number(outcome.pass_rate) for outcome in known]
        self._table["advantage"][places] = [_number(outcome.advantage) for outcome in known]
        self._table["seen"][places] = step
        self._table["waiting"][places] = 0

    def state(self) -> State:
        taken = {name: column[: len(self._index)].copy() for name, column in self._table.items()}
        first = {"seed": [*self._seed], "rows": self._rows, "passed": self._new.passed}
        return {"passed": self.passed, "draws": self._draws, "first": first, "table": taken}

    def load(self, state: State) -> None:
        self.passed, self._draws = state["passed"], state["draws"]
        first = state["first"]
        if (first["seed"], first["rows"]) == ([*self._seed], self._rows):
            self._new.passed = first["passed"]
        # Else the first pass has another order, and begins again: rows in the table are passed over.
        table = {name: np.array(state["table"][name], dtype=np.float64) for name in _COLUMNS}
        there = table["row"] < self._rows
        self._table = {name: column[there] for name, column in table.items()}
        self._index = {int(row): place for place, row in enumerate(self._table["row"])}

    def _drawn(self, count: int, unusable: Collection[int], step: int, draw: np.random.Generator) -> list[int]:
        known = len(self._index)
        weights = self._weights(unusable, step)
        left = max(0, self._rows - self._new.passed)
        total = left + weights.sum()
        new = min(left, int(draw.binomial(count, left / total)) if total else 0)
        new = max(new, min(left, count - int(np.count_nonzero(weights))))
        fresh = self._fresh(new, unusable)
        wanted = min(count - len(fresh), known)
        # The smallest of exponential variables with these rates are a draw without replacement (Efraimidis and Spirakis
        # 2006). Rows of weight 0 come last, the one seen longest ago first.
        seen = self._table["seen"][:known]
        with np.errstate(divide="ignore"):
            keys = draw.exponential(size=known) / weights
        keys[self._is_unusable(unusable)[:known]] = np.nan
        order = np.lexsort((seen, keys))[:wanted]
        old = [int(row) for row in self._table["row"][order[~np.isnan(keys[order])]]]
        self._table["waiting"][[self._index[row] for row in old]] = 1
        return fresh + old

    def _weights(self, unusable: Collection[int], step: int) -> np.ndarray:
        """Weights of the rows in the table, float64; 0 for those that are not drawn."""
        rules, known = self._rules, len(self._index)
        rate, advantage, seen, waiting = (self._table[name][:known] for name in _COLUMNS[1:])
        priority = np.abs(advantage) if rules.priority == "advantage" else 1 - rate
        outside = np.clip(np.nan_to_num(priority), rules.floor, 1)
        weights = np.where(rate >= rules.low, 1.0, outside)
        weights[(rate > rules.high) & (step - seen <= rules.skip_solved_for)] = 0
        weights[waiting > 0] = rules.floor
        weights[self._is_unusable(unusable)] = 0
        return weights

    def _is_unusable(self, unusable: Collection[int]) -> np.ndarray:
        return np.isin(self._table["row"][: len(self._index)], np.array([*unusable], dtype=np.float64))

    def _fresh(self, count: int, unusable: Collection[int]) -> list[int]:
        """At most so many rows that were never taken, which enter the table."""
        rows: list[int] = []
        while len(rows) < count and self._new.passed < self._rows:
            most = min(count - len(rows), self._rows - self._new.passed)
            rows += [row for row in self._new.pass_over(most) if row not in unusable and row not in self._index]
        begin, end = len(self._index), len(self._index) + len(rows)
        if end > len(self._table["row"]):
            # At least double, so that the table grows in linear time.
            more = max(end, 2 * begin) - len(self._table["row"])
            self._table = {name: np.concatenate([old, np.full(more, np.nan)]) for name, old in self._table.items()}
        self._table["row"][begin:end] = rows
        self._table["seen"][begin:end] = 0
        self._table["waiting"][begin:end] = 1
        self._index |= {row: begin + place for place, row in enumerate(rows)}
        return rows


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
