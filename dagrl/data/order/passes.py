"""Orders of the rows of one source, epoch after epoch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from dagrl.config.share import ALL, Share
from dagrl.data.order.sampler import Outcome, State

Window = Callable[[int, int], tuple[np.ndarray, int]]
"""``window(epoch, place)``: rows of a piece of the epoch that holds `place`, int64, and the place of its first row."""

WHOLE_ROWS = 2**18
"""A source with more rows is shuffled in windows."""
_WINDOW_ROWS = 2**16
_SLICE_ROWS = 4096


class RowOrder(Protocol):
    """The order of the rows of one source."""

    passed: int
    """Number of rows taken or skipped so far, over all epochs."""

    def take(self, count: int, unusable: Collection[int], step: int) -> list[int]:
        """The next rows, none of which is `unusable`; at least one row is usable."""
        ...

    def observe(self, step: int, outcomes: Mapping[int, Outcome]) -> None: ...

    def state(self) -> State: ...

    def load(self, state: State) -> None: ...


class Passes:
    """Passes over all rows; the order depends only on the number of the epoch.

    The order is the same for all shares of the rows, so that together they take each row once in an epoch.
    """

    def __init__(self, rows: int, window: Window, share: Share = ALL) -> None:
        self.passed = 0
        self._rows, self._window, self._share = rows, window, share
        self._piece: tuple[int, int, np.ndarray] | None = None
        """Epoch, first place and rows of the newest piece."""

    def take(self, count: int, unusable: Collection[int], step: int) -> list[int]:
        del step
        taken: list[int] = []
        while len(taken) < count:
            taken += [row for row in self.pass_over(count - len(taken)) if row not in unusable]
        return taken

    def pass_over(self, most: int) -> list[int]:
        """At most `count` of the next rows, usable or not; may be empty without the rows of other shares."""
        rows = self._from(self.passed, most)
        self.passed += len(rows)
        return rows[rows % self._share.of == self._share.number - 1].tolist()

    def observe(self, step: int, outcomes: Mapping[int, Outcome]) -> None:
        pass

    def state(self) -> State:
        return {"passed": self.passed, "rows": self._rows}

    def load(self, state: State) -> None:
        # The source may have changed, but the place in the epoch stays.
        epoch, place = divmod(int(state["passed"]), int(state["rows"]))
        self.passed = epoch * self._rows + min(place, self._rows)

    def _from(self, passed: int, most: int) -> np.ndarray:
        """At most `count` of the next rows, at least one."""
        epoch, place = divmod(passed, self._rows)
        if self._piece is None or self._piece[0] != epoch or not 0 <= place - self._piece[1] < len(self._piece[2]):
            rows, first = self._window(epoch, place)
            self._piece = (epoch, first, rows)
        _, first, rows = self._piece
        return rows[place - first : place - first + most]


def in_order(rows: np.ndarray | int) -> Window:
    """The same order in each epoch: these rows, or all in the order of the file."""
    if isinstance(rows, int):
        count = rows
        return lambda _, place: (np.arange(place, min(count, place + _SLICE_ROWS), dtype=np.int64), place)
    return lambda _, __: (rows, 0)


def sorted_by(values: np.ndarray, *, descending: bool) -> Window:
    """In the order of a column's values, numbers or texts; equal values are in the order of the file."""
    order = np.argsort(values[::-1] if descending else values, kind="stable")
    return in_order((len(values) - 1 - order)[::-1].astype(np.int64) if descending else order.astype(np.int64))


def shuffled(
    groups: Sequence[int] | np.ndarray, seed: tuple[int, ...], kept: int | None = None, whole: int = WHOLE_ROWS
) -> Window:
    """A new order each epoch.

    A source of more than `whole` rows, or `kept` groups, is shuffled on two levels, so that few pieces of the file are
    in use at a time: its groups of rows, and the rows within each window of groups.

    Args:
        groups: rows of each piece that is read at once.
        seed: of the source.
        kept: groups that are in memory at the same time; by default all.
        whole: rows up to which each order is equally likely.
    """
    ends = np.cumsum(groups)
    rows, most = int(ends[-1]), len(ends) if kept is None else kept
    if rows <= whole and len(ends) <= most:
        return lambda epoch, _: (np.random.default_rng([*seed, epoch]).permutation(rows), 0)
    sizes = np.asarray(groups, dtype=np.int64)
    together = max(1, min(most, round(_WINDOW_ROWS / sizes.mean())))
    newest: list[tuple[int, np.ndarray, np.ndarray]] = []

    def window(epoch: int, place: int) -> tuple[np.ndarray, int]:
        if not newest or newest[0][0] != epoch:
            order = np.random.default_rng([*seed, epoch]).permutation(len(sizes))
            newest[:] = [(epoch, order, np.concatenate([[0], np.cumsum(sizes[order])]))]
        _, order, starts = newest[0]
        group = int(np.searchsorted(starts, place, side="right")) - 1
        begin = group - group % together
        pieces = [
            np.arange(ends[number] - sizes[number], ends[number]) for number in order[begin : begin + together].tolist()
        ]
        draw = np.random.default_rng([*seed, epoch, begin // together])
        return draw.permutation(np.concatenate(pieces)), int(starts[begin])

    return window


_COLUMNS = ("row", "rate", "advantage", "seen", "waiting")


@dataclass(frozen=True, slots=True)
class AdaptiveRules:
    """Weights of rows: 1 in the band and before the first outcome."""

    low: float
    high: float
    """The band of pass rates, both ends included."""
    skip_solved_for: int
    """Steps for which a row above the band is not drawn."""
    priority: Literal["advantage", "pass_rate"]
    """Weight of a row below the band: |advantage|, or 1 - pass rate."""
    floor: float


class Adaptive:
    """Draws rows without replacement within a take, with weights from their last outcomes."""

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
        # As in passes over the rows, including rows of other shares.
        self.passed += count * self._share.of
        taken: list[int] = []
        excluded = set(unusable)
        while len(taken) < count:
            rows = self._drawn(count - len(taken), excluded, step, draw)
            if not rows and excluded == set(unusable):
                raise ValueError("data.train: no prompt of a source fits max_prompt_tokens; raise that")
            # Without further rows the take is larger than the source, and starts again.
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
        # Otherwise the first pass has another order, and starts again: rows in the table are skipped.
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
        # 2006). Rows of weight 0 come last, the least recent first.
        seen = self._table["seen"][:known]
        with np.errstate(divide="ignore"):
            keys = draw.exponential(size=known) / weights
        keys[self._is_unusable(unusable)[:known]] = np.nan
        order = np.lexsort((seen, keys))[:wanted]
        old = [int(row) for row in self._table["row"][order[~np.isnan(keys[order])]]]
        self._table["waiting"][[self._index[row] for row in old]] = 1
        return fresh + old

    def _weights(self, unusable: Collection[int], step: int) -> np.ndarray:
        """Weights of the rows in the table, float64; 0 for excluded rows."""
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
        """At most `count` rows that were never taken, which enter the table."""
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
