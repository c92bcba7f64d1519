"""Reads prompts by their ids, and those of the next step in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from dagrl.data.batch import Batch, Column
from dagrl.data.order.ids import prompt_id, row_of, source_of
from dagrl.data.prompts import PromptLoader


@dataclass(frozen=True, slots=True)
class ReadPrompts:
    """Prompts of any sources."""

    ids: tuple[int, ...]
    batch: Batch
    """Columns of `PromptSlice`, and the name of the source in ``data_set``; a row per id."""
    dropped: tuple[int, ...] = ()
    """Ids of prompts that are too long."""
    cut: tuple[int, ...] = ()
    """Ids of prompts that are shortened."""


class ReadAhead:
    """Reads the prompts of one step after the other."""

    def __init__(self, sources: Sequence[str], loader_of: Callable[[str], PromptLoader]) -> None:
        """`sources` in the order of their numbers in ids; `loader_of` opens one."""
        self._sources, self._loader_of = sources, loader_of
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._ahead: Future[ReadPrompts] | None = None
        self._read: list[ReadPrompts] = []
        """The prompts that were read for the next call."""

    def read(self, ids: Sequence[int], ahead: Sequence[int] = ()) -> ReadPrompts:
        """The prompts `ids`, in this order; those of `ahead` are read in the background.

        If any of them is too long, only `dropped` counts: the caller asks again, with others in their places.
        Raises ValueError as `PromptLoader.read` does.
        """
        self._end_background()
        known = {each for read in self._read for each in (*read.ids, *read.dropped)}
        if missing := [each for each in dict.fromkeys(ids) if each not in known]:
            self._read.append(self._load(missing))
        wanted = set(ids)
        dropped = tuple(each for read in self._read for each in read.dropped if each in wanted)
        if dropped:
            return ReadPrompts((), self._read[0].batch, dropped)
        read, self._read = self._read, []
        places = {each: place for place, each in enumerate(each for piece in read for each in piece.ids)}
        table = Batch.concat([Batch(np.arange(len(piece.ids)), piece.batch.columns) for piece in read])
        batch = Batch(np.arange(len(table)), table.columns).take(np.array([places[each] for each in ids], np.int64))
        cut = {each for piece in read for each in piece.cut}
        if ahead:
            self._ahead = self._thread.submit(self._load, list(dict.fromkeys(ahead)))
        return ReadPrompts(tuple(ids), batch, cut=tuple(each for each in ids if each in cut))

    def _end_background(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            wait([ahead])
            # A failure comes again if the prompt is asked for.
            if ahead.exception() is None:
                self._read.append(ahead.result())

    def _load(self, ids: Sequence[int]) -> ReadPrompts:
        pieces, kept, dropped, cut = list[Batch](), list[int](), list[int](), list[int]()
        for source, mine in groupby(sorted(ids, key=source_of), key=source_of):
            name = self._sources[source]
            read = self._loader_of(name).read([row_of(each) for each in mine])
            names = Column.text([name] * len(read.rows))
            pieces.append(Batch(np.arange(len(names)), {**read.columns, "data_set": names}))
            kept += [prompt_id(source, row) for row in read.rows.tolist()]
            dropped += [prompt_id(source, row) for row in read.dropped]
            cut += [prompt_id(source, row) for row in read.cut]
        return ReadPrompts(tuple(kept), Batch.concat(pieces), tuple(dropped), tuple(cut))
