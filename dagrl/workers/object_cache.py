"""The rows of a worker's share, out of the blocks that hold them, wherever those lie.

An engine's worker keeps the blocks that it has opened, and what it has made itself, until their step is committed, for
an update reads again what the log-probs of its rows were computed from, and to open a block takes longer than to take
rows out of it. Opened ones are views of Ray's object store, where they stay as long in any case.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from dagrl.data.batch import Batch, Column, find_rows
from dagrl.ops.base import Part
from dagrl.workers.messages import Begun, Held, PartWork
from dagrl.workers.objects import get_within


class Blocks:
    """Those of one worker; several of its threads may ask at once."""

    def __init__(self, timeout_s: float, *, keep: bool) -> None:
        """Each wait is bounded by `timeout_s`."""
        self._timeout_s, self._keep = timeout_s, keep
        self._opened: dict[int, dict[Held, Batch]] = {}
        """Step -> what was read or made in it. Read blocks have the refs' ids for names: of a ref that outlives a call,
        Ray asks the owner about it."""
        self._lock = threading.Lock()

    def forget(self, committed: int) -> None:
        """Steps up to `committed` are over."""
        with self._lock:
            self._opened = {step: opened for step, opened in self._opened.items() if step > committed}

    def keep(self, step: int, name: Held, block: Batch) -> None:
        """Keep what was made in a step."""
        with self._lock:
            self._opened.setdefault(step, {})[name] = block

    def parts(self, step: int, parts: Sequence[PartWork]) -> list[Part]:
        """Bring the columns of all parts here and put the rows of each in order.

        ObjectsLateError where they do not come in time.
        """
        with self._lock:
            opened = self._opened.setdefault(step, {}) if self._keep else {}
        refs = dict.fromkeys(ref for part in parts for source in part.sources for ref in source.refs)
        unread = [ref for ref in refs if not isinstance(ref, bytes) and ref.binary() not in opened]
        names = {name for part in parts for source in part.sources for name in source.columns.values()}
        found = get_within(unread, self._timeout_s, f"{len(unread)} blocks of {', '.join(sorted(names))}")
        opened.update(zip((ref.binary() for ref in unread), found, strict=True))
        return [Part(part.index, _assembled(part, opened)) for part in parts]

    def begun(self, begun: Begun, outputs: Mapping[str, str]) -> Batch:
        """Bring what an earlier step has sampled for a group here, by the op's names of its columns (`outputs`)."""
        block: Batch = get_within([begun.ref], self._timeout_s, "what an earlier step has sampled of a prompt")[0]
        mine = {name: block[theirs] for name, theirs in outputs.items() if theirs in block}
        return Batch(block.rows, mine).in_order(begun.rows)


def _assembled(part: PartWork, blocks: Mapping[Held, Batch]) -> Batch:
    columns: dict[str, Column] = {}
    for source in part.sources:
        there = [blocks[ref if isinstance(ref, bytes) else ref.binary()] for ref in source.refs]
        places = find_rows(part.rows, np.concatenate([block.rows for block in there]))
        for mine, theirs in source.columns.items():
            columns[mine] = Column.gather([block[theirs] for block in there], places)
    return Batch(part.rows, columns)
