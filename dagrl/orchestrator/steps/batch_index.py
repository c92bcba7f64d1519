"""Where the columns of one batch lie: which task put which rows into which object. Metadata only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import ray

from dagrl.data.redistribute import RowIndex
from dagrl.data.shards import shard_bounds
from dagrl.scheduler.plan import PlannedTask
from dagrl.workers.messages import Block, Source


@dataclass(frozen=True, slots=True)
class Arrival:
    """Where some groups that were waited for belong."""

    shards: tuple[int, ...]
    """Shards that hold any of them."""
    complete: tuple[int, ...]
    """Shards of which nothing is missing any more."""
    surplus: tuple[int, ...]
    """Groups that came when the batch was full."""


class _Awaited:
    """How many rows each shard still waits for."""

    def __init__(self, missing: list[int]) -> None:
        self._missing = missing
        self.left = sum(missing)
        """Of all shards together."""
        self._first = 0

    def take(self, shard: int, rows: int) -> int:
        """Some rows of a shard are there; how many it waits for now."""
        self._missing[shard] -= rows
        self.left -= rows
        return self._missing[shard]

    def first_open(self) -> int | None:
        """The first shard that waits for any."""
        while self._first < len(self._missing) and not self._missing[self._first]:
            self._first += 1
        return self._first if self._first < len(self._missing) else None


class Ledger:
    """The blocks of one step's training or validation batch."""

    def __init__(self, group_size: int, shards: int) -> None:
        self.group_size = group_size
        """Rows of a group."""
        self.first_group = 0
        """Of the round in which the batch is."""
        self._refs: dict[str, list[ray.ObjectRef]] = {}
        """Task -> the objects that hold its blocks."""
        self._index: dict[str, RowIndex] = {}
        """Task -> where rows lie in those."""
        self._shard_rows = _no_rows(shards)
        self._shard_of_group: dict[int, int] = {}
        self._chosen: list[list[int]] | None = None
        """Where the batch is chosen: the groups of each shard, in the order in which they came."""
        self._tokens = np.zeros(0, dtype=np.int64)
        """Of each row, and room for more."""
        self._positions: dict[int, int] = {}
        self._awaited: dict[str, _Awaited] = {}
        """By the task that brings its rows one by one."""

    def add_source(self, task: str, block: Block) -> None:
        """Note a shard of the source: it says which rows the batch has."""
        (shard,) = block.shards
        self._shard_rows[shard] = block.rows
        groups = np.unique(self.groups(block.rows)).tolist()
        self._shard_of_group |= dict.fromkeys(groups, shard)
        if block.positions is not None:
            self._positions |= dict(zip(groups, block.positions.tolist(), strict=True))
        if (end := int(block.rows.max(initial=-1)) + 1) > len(self._tokens):
            # Twice as long at least, so that shard after shard costs no more than all of them together.
            room = np.zeros(max(end, 2 * len(self._tokens)), dtype=np.int64)
            room[: len(self._tokens)] = self._tokens
            self._tokens = room
        self.add(task, block)

    def add(self, task: str, block: Block) -> None:
        """Note what a task has put into the object store."""
        if block.tokens is not None:
            self._tokens[block.rows] += block.tokens
        if block.ref is not None:
            self.promise(task, block.rows, block.ref)

    def promise(self, task: str, rows: np.ndarray, ref: ray.ObjectRef) -> None:
        """Note where a task that adds no tokens will have put what it makes of these rows."""
        if len(rows):
            self._refs.setdefault(task, []).append(ref)
            self._index.setdefault(task, RowIndex()).add(rows)

    def begin_round(self) -> None:
        """The source brings further groups, which are the batch from now on; see `select`."""
        self.first_group = max(self._shard_of_group, default=-1) + 1
        self._deal_anew(_no_rows(len(self._shard_rows)))

    def select(self, groups: Sequence[int]) -> None:
        """The batch is these groups, of whatever round, which are dealt into the shards in this order."""
        rows = self.rows_of(groups)
        bounds = shard_bounds(len(rows), self.group_size, len(self._shard_rows))
        self._deal_anew([rows[begin:end] for begin, end in bounds])

    def _deal_anew(self, shard_rows: list[np.ndarray]) -> None:
        self._shard_rows, self._chosen = shard_rows, None
        self._awaited.clear()
        for shard, rows in enumerate(shard_rows):
            self._shard_of_group |= dict.fromkeys(self.groups(rows).tolist(), shard)

    def expect(self, task: str, choose: int | None = None) -> None:
        """A task is about to bring its rows in pieces of whole groups, in any order: see `arrived`.

        With `choose`, the batch is the first so many groups that arrive, and the shards are filled in that order; then
        no other task may bring its rows so.
        """
        assert self._chosen is None or task in self._awaited, "the batch is what another task has brought"
        if choose is None:
            self._awaited[task] = _Awaited([len(rows) for rows in self._shard_rows])
        else:
            bounds = shard_bounds(choose * self.group_size, self.group_size, len(self._shard_rows))
            self._awaited[task] = _Awaited([end - begin for begin, end in bounds])
            self._chosen = [[] for _ in self._shard_rows]

    def arrived(self, task: str, rows: np.ndarray) -> Arrival:
        """Note rows of whole groups that a task has brought."""
        awaited = self._awaited[task]
        touched: dict[int, int] = {}
        surplus = []
        for group in dict.fromkeys(self.groups(rows).tolist()):
            shard = self._shard_of_group[group] if self._chosen is None else awaited.first_open()
            if shard is None:
                surplus.append(group)
                continue
            if self._chosen is not None:
                self._chosen[shard].append(group)
            touched[shard] = awaited.take(shard, self.group_size)
        return Arrival(tuple(touched), tuple(shard for shard, left in touched.items() if left == 0), tuple(surplus))

    def complete(self, task: str) -> bool:
        """Whether nothing is missing of what was expected of a task."""
        return self._awaited[task].left == 0

    def rows(self, shards: tuple[int, ...]) -> np.ndarray:
        """Ids of the rows in these shards, int64, ascending."""
        if self._chosen is not None:
            return self.rows_of(sorted(group for shard in shards for group in self._chosen[shard]))
        return np.sort(np.concatenate([self._shard_rows[shard] for shard in shards]))

    def rows_of(self, groups: Sequence[int]) -> np.ndarray:
        """Ids of the rows of these groups, int64, in their order."""
        starts = np.array(groups, dtype=np.int64) * self.group_size
        return (starts[:, None] + np.arange(self.group_size)).ravel()

    def position(self, group: int) -> int:
        """Where the group's prompt stands in the data set; of training batches only."""
        return self._positions[group]

    def tokens(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of each row so far, int64 [rows]."""
        return self._tokens[rows]

    def groups(self, rows: np.ndarray) -> np.ndarray:
        """Group of each row, int64 [rows]."""
        return rows // self.group_size

    def groups_in(self, rows: np.ndarray) -> list[int]:
        """The groups of these rows, each once, ascending."""
        return np.unique(self.groups(rows)).tolist()

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole batch so far."""
        return int(self._tokens[self.rows(tuple(range(len(self._shard_rows))))].sum())

    def sources(self, task: PlannedTask, rows: np.ndarray) -> tuple[Source, ...]:
        """Where the columns that `task` reads of these rows lie, by the tasks that wrote them.

        Without rows, the columns with their types all the same, for ranks that take part without any.
        """
        found = []
        for producer in task.needs:
            columns = {mine: theirs for mine, (task_name, theirs) in task.inputs.items() if task_name == producer}
            if len(rows):
                blocks = self._index[producer].find(rows).tolist()
                refs = dict.fromkeys(self._refs[producer][block] for block in blocks)
                found.append(Source(tuple(refs), columns))
            elif producer in self._refs:
                found.append(Source((self._refs[producer][0],), columns))
        return tuple(found)


def _no_rows(shards: int) -> list[np.ndarray]:
    return [np.zeros(0, dtype=np.int64) for _ in range(shards)]
