"""The index of one batch: the objects in which tasks stored rows. Metadata only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import ray

from dagrl.data.redistribute import RowIndex, shard_bounds
from dagrl.ops.work import ColumnSource
from dagrl.scheduler.plan import PlannedTask
from dagrl.workers.messages import Block

_NO_ROWS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Arrival:
    """The shards of arriving groups."""

    shards: tuple[int, ...]
    """Shards with any of the groups."""
    complete: tuple[int, ...]
    """Shards that are complete now."""
    surplus: tuple[int, ...]
    """Groups that arrived when the batch was full."""


class BatchIndex:
    """The blocks of one step's training or validation batch.

    Group g has the rows ``g * group_size``, ``g * group_size + 1``, ... The ids have gaps where a source has fewer rows
    for a prompt than another.
    """

    def __init__(self, group_size: int, shards: int) -> None:
        """`group_size`: rows of the largest group."""
        self.group_size = group_size
        self.first_group = 0
        """The first group of the current round."""
        self.returned: frozenset[int] = frozenset()
        """Groups of earlier steps that a buffer returned."""
        self._refs: dict[str, list[ray.ObjectRef]] = {}
        """Task -> the objects with its blocks."""
        self._index: dict[str, RowIndex] = {}
        """Task -> index of the object that holds a row."""
        self._shard_rows = [_NO_ROWS] * shards
        self._shard_of_group: dict[int, int] = {}
        self._rows_of_group: dict[int, int] = {}
        """Group -> number of its rows."""
        self._chosen: list[list[int]] | None = None
        """With over-sampling: the groups of each shard, in the order in which they arrived."""
        self._tokens = np.zeros(0, dtype=np.int64)
        """Tokens of each row. May be longer than the number of rows."""
        self._prompts: dict[int, int] = {}
        self._missing: dict[str, list[int]] = {}
        """Task whose rows arrive group by group -> number of groups that each shard still waits for."""

    @staticmethod
    def recorded(group_size: int, shards: int, rows: Mapping[int, np.ndarray], tokens: np.ndarray) -> BatchIndex:
        """Restore a batch: the rows of shards, and `tokens` by row id."""
        batch = BatchIndex(group_size, shards)
        for mine in rows.values():
            batch._count(mine)
        batch._reset_shards([rows.get(shard, _NO_ROWS) for shard in range(shards)])
        batch._tokens = tokens
        return batch

    def add_source(self, task: str, block: Block) -> None:
        """Add a shard of the source, which defines the rows of the batch."""
        (shard,) = block.shards
        self._shard_rows[shard] = block.rows
        groups = self._count(block.rows)
        self._shard_of_group |= dict.fromkeys(groups, shard)
        if block.prompts is not None:
            self._prompts |= dict(zip(groups, block.prompts.tolist(), strict=True))
        self._make_room(block.rows)
        self.add(task, block)

    def _make_room(self, rows: np.ndarray) -> None:
        if (end := int(rows.max(initial=-1)) + 1) > len(self._tokens):
            # At least double, so that adding all shards takes linear time.
            tokens = np.zeros(max(end, 2 * len(self._tokens)), dtype=np.int64)
            tokens[: len(self._tokens)] = self._tokens
            self._tokens = tokens

    def _count(self, rows: np.ndarray) -> list[int]:
        """The groups of these rows, which must be complete."""
        groups, counts = np.unique(self.groups(rows), return_counts=True)
        self._rows_of_group |= dict(zip(groups.tolist(), counts.tolist(), strict=True))
        return groups.tolist()

    def add(self, task: str, block: Block) -> None:
        if block.tokens is not None:
            self._tokens[block.rows] += block.tokens
        if block.ref is not None:
            self.promise(task, block.rows, block.ref)

    def promise(self, task: str, rows: np.ndarray, ref: ray.ObjectRef) -> None:
        """Add the object in which a task, which adds no tokens, will store its output for these rows."""
        if len(rows):
            self._refs.setdefault(task, []).append(ref)
            self._index.setdefault(task, RowIndex()).add(rows)

    @property
    def next_group(self) -> int:
        return max(self._shard_of_group, default=-1) + 1

    def begin_round(self) -> None:
        """The source will add further groups, which form the batch until `select`."""
        self.first_group = self.next_group
        self._reset_shards([_NO_ROWS] * len(self._shard_rows))

    def select(self, groups: Sequence[int]) -> None:
        """Make these groups, of any round, the batch; they are split into shards in this order."""
        bounds = shard_bounds(len(groups), len(self._shard_rows))
        self._reset_shards([self.rows_of(groups[begin:end]) for begin, end in bounds])

    def extend(self, task: str, block: Block) -> None:
        """Add a block of a buffer. New groups in it become part of the batch: each shard gets its share of them."""
        first = self.next_group
        if added := [group for group in self.groups_in(block.rows) if group >= first]:
            shards = len(self._shard_rows)
            own = [self.rows((shard,)) for shard in range(shards)]
            self._count(block.rows)
            shares = [self.rows_of(added[begin:end]) for begin, end in shard_bounds(len(added), shards)]
            self._reset_shards([np.concatenate(rows) for rows in zip(own, shares, strict=True)])
            self.returned |= frozenset(added)
            self._make_room(block.rows)
        self.add(task, block)

    def _reset_shards(self, shard_rows: list[np.ndarray]) -> None:
        self._shard_rows, self._chosen = shard_rows, None
        self._missing.clear()
        for shard, rows in enumerate(shard_rows):
            self._shard_of_group |= dict.fromkeys(self.groups(rows).tolist(), shard)

    def expect(self, task: str, choose: int | None = None) -> None:
        """A task will add its rows group by group, in any order: see `arrived`.

        With `choose`, the first `choose` groups that arrive are the batch, and fill its shards in that order. Then no
        other task may add its rows this way.
        """
        assert self._chosen is None or task in self._missing, "another task has chosen the batch"
        if choose is None:
            self._missing[task] = [len(self.groups_in(rows)) for rows in self._shard_rows]
        else:
            bounds = shard_bounds(choose, len(self._shard_rows))
            self._missing[task] = [end - begin for begin, end in bounds]
            self._chosen = [[] for _ in self._shard_rows]

    def arrived(self, task: str, rows: np.ndarray) -> Arrival:
        missing = self._missing[task]
        touched: dict[int, int] = {}
        surplus = []
        for group in dict.fromkeys(self.groups(rows).tolist()):
            if self._chosen is None:
                shard = self._shard_of_group[group]
            elif any(missing):
                shard = next(shard for shard, left in enumerate(missing) if left)
                self._chosen[shard].append(group)
            else:
                surplus.append(group)
                continue
            missing[shard] -= 1
            touched[shard] = missing[shard]
        return Arrival(tuple(touched), tuple(shard for shard, left in touched.items() if left == 0), tuple(surplus))

    def complete(self, task: str) -> bool:
        return not any(self._missing[task])

    def rows(self, shards: tuple[int, ...]) -> np.ndarray:
        """Ids of the rows in these shards, int64, ascending."""
        if self._chosen is not None:
            return self.rows_of(sorted(group for shard in shards for group in self._chosen[shard]))
        return np.sort(np.concatenate([self._shard_rows[shard] for shard in shards]))

    def rows_of(self, groups: Sequence[int]) -> np.ndarray:
        """Ids of the rows of these groups, int64, in this order."""
        sizes = np.array([self._rows_of_group[group] for group in groups], dtype=np.int64)
        starts = np.array(groups, dtype=np.int64) * self.group_size
        return np.repeat(starts - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())

    def prompt(self, group: int) -> int:
        """Id of the group's prompt. Only for training batches."""
        return self._prompts[group]

    def is_returned(self, group: int) -> bool:
        """Whether a buffer added the group, whose prompt belongs to an earlier step."""
        return group not in self._prompts

    def tokens_of(self, group: int) -> int:
        return int(self._tokens[self.rows_of((group,))].sum())

    def tokens(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of each row so far, int64 [rows]."""
        return self._tokens[rows]

    def groups(self, rows: np.ndarray) -> np.ndarray:
        return rows // self.group_size

    def groups_in(self, rows: np.ndarray) -> list[int]:
        """The distinct groups of these rows, ascending."""
        return np.unique(self.groups(rows)).tolist()

    @property
    def all_rows(self) -> np.ndarray:
        """Ids of the rows of the batch, int64, ascending."""
        return self.rows(tuple(range(len(self._shard_rows))))

    @property
    def total_tokens(self) -> int:
        return int(self._tokens[self.all_rows].sum())

    def objects(self, task: str, rows: np.ndarray) -> list[ray.ObjectRef]:
        """The objects in which a task stores its output for these rows, now or later."""
        if not len(rows) or task not in self._index:
            return []
        return list(dict.fromkeys(self._refs[task][block] for block in self._index[task].find(rows).tolist()))

    def sources(self, task: PlannedTask, rows: np.ndarray) -> tuple[ColumnSource, ...]:
        """The stored columns that `task` reads for these rows, by producer.

        Without rows one object is still named, because a rank without rows needs the types of its columns.
        """
        sources = []
        for producer in task.needs:
            columns = {mine: theirs for mine, (task_name, theirs) in task.inputs.items() if task_name == producer}
            if len(rows):
                sources.append(ColumnSource(tuple(self.objects(producer, rows)), columns))
            elif producer in self._refs:
                sources.append(ColumnSource((self._refs[producer][0],), columns))
        return tuple(sources)
