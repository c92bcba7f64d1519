"""Reads the prompts of the next step while this one runs, so that no server waits for a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from dagrl.data.prompts import PromptLoader, PromptSlice


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What is being read, or is there already."""

    position: int
    count: int
    prompts: Future[PromptSlice]


class ReadAhead:
    """The slices of a loader, for one who takes them one after the other: the next is read in the background."""

    def __init__(self, loader: PromptLoader) -> None:
        self._loader = loader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._ahead: _Ahead | None = None

    def take(self, position: int, count: int, *, first: Sequence[int] = ()) -> PromptSlice:
        """What `PromptLoader.take` gives or raises, whatever was read before."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            # Wanted or not: the loader is for one thread at a time.
            wait([ahead.prompts])
        if ahead is not None and not first and (ahead.position, ahead.count) == (position, count):
            taken = ahead.prompts.result()
        else:
            taken = self._loader.take(position, count, first=first)
        following = self._thread.submit(self._loader.take, taken.next_position, count)
        self._ahead = _Ahead(taken.next_position, count, following)
        return taken
