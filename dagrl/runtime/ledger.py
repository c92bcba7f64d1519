"""Where the columns of one batch lie: which task put which rows into which object. Metadata only."""

from __future__ import annotations

import numpy as np

from dagrl.data.redistribute import locate
from dagrl.plan.plan import PlannedTask
from dagrl.runtime.messages import Block, Source


class Ledger:
    """The blocks of one step's training or validation batch."""

    def __init__(self, group_size: int, shards: int) -> None:
        self._group_size = group_size
        self._blocks: dict[str, list[Block]] = {}
        self._shard_rows: list[np.ndarray] = [np.zeros(0, dtype=np.int64) for _ in range(shards)]
        self._tokens = np.zeros(0, dtype=np.int64)
        self._missing: dict[str, list[int]] = {}

    def add_source(self, task: str, block: Block) -> None:
        """Note a shard of the source: it says which rows the batch has."""
        (shard,) = block.shards
        self._shard_rows[shard] = block.rows
        if len(block.rows):
            grown = np.zeros(max(len(self._tokens), int(block.rows.max()) + 1), dtype=np.int64)
            grown[: len(self._tokens)] = self._tokens
            self._tokens = grown
        self.add(task, block)

    def add(self, task: str, block: Block) -> None:
        """Note what a task has put into the object store."""
        if block.tokens is not None:
            self._tokens[block.rows] += block.tokens
        if block.ref is not None and len(block.rows):
            self._blocks.setdefault(task, []).append(block)

    def arrived(self, task: str, block: Block) -> list[int]:
        """Shards that `block` completes, of a task whose blocks hold rows of one shard each."""
        left = self._missing.setdefault(task, [len(rows) for rows in self._shard_rows])
        for shard in block.shards:
            left[shard] -= len(block.rows)
        return [shard for shard in block.shards if left[shard] == 0]

    def rows(self, shards: tuple[int, ...]) -> np.ndarray:
        """Ids of the rows in these shards, int64, ascending."""
        return np.concatenate([self._shard_rows[shard] for shard in shards])

    def tokens(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of each row so far, int64 [rows]."""
        return self._tokens[rows]

    def groups(self, rows: np.ndarray) -> np.ndarray:
        """Group of each row, int64 [rows]."""
        return rows // self._group_size

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole batch so far."""
        return int(self._tokens.sum())

    def sources(self, task: PlannedTask, rows: np.ndarray) -> tuple[Source, ...]:
        """Where the columns that `task` reads of these rows lie; a block once for each task that wrote it."""
        if len(rows) == 0:
            return self._empty_sources(task)
        found = []
        for producer in task.needs:
            columns = {mine: theirs for mine, (task_name, theirs) in task.inputs.items() if task_name == producer}
            if not columns:
                continue
            blocks = self._blocks[producer]
            for index, positions in locate([block.rows for block in blocks], rows):
                whole = len(positions) == len(blocks[index].rows) and bool((np.diff(positions) == 1).all())
                ref = blocks[index].ref
                assert ref is not None
                found.append(Source(ref, None if whole else positions, columns))
        return tuple(found)

    def _empty_sources(self, task: PlannedTask) -> tuple[Source, ...]:
        """No rows, but the columns with their types, for ranks that take part without rows."""
        nothing = np.zeros(0, dtype=np.int64)
        found = []
        for producer in task.needs:
            columns = {mine: theirs for mine, (task_name, theirs) in task.inputs.items() if task_name == producer}
            if columns and producer in self._blocks:
                ref = self._blocks[producer][0].ref
                assert ref is not None
                found.append(Source(ref, nothing, columns))
        return tuple(found)
