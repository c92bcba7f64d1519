"""Orders of one source that pass over its rows, epoch after epoch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

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
    """Rows that were taken or passed over so far, over all epochs."""

    def take(self, count: int, unusable: Collection[int], step: int) -> list[int]:
        """The next rows, none of which is `unusable`; at least one row is usable."""
        ...

    def observe(self, step: int, outcomes: Mapping[int, Outcome]) -> None: ...

    def state(self) -> State: ...

    def load(self, state: State) -> None: ...


class Passes:
    """Passes over all rows, each in an order that only the number of the epoch determines.

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
        """At most so many of the next rows, usable or not; without those of other shares, none may be left."""
        rows = self._from(self.passed, most)
        self.passed += len(rows)
        return rows[rows % self._share.of == self._share.number - 1].tolist()

    def observe(self, step: int, outcomes: Mapping[int, Outcome]) -> None:
        pass

    def state(self) -> State:
        return {"passed": self.passed, "rows": self._rows}

    def load(self, state: State) -> None:
        # The source may have other rows now: the place in the epoch stays.
        epoch, place = divmod(int(state["passed"]), int(state["rows"]))
        self.passed = epoch * self._rows + min(place, self._rows)

    def _from(self, passed: int, most: int) -> np.ndarray:
        """At most so many of the next rows, at least one."""
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
    """By the values of a column, which are numbers or texts; equal ones in the order of the file."""
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
