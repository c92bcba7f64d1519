"""Reads the prompts of the next step in the background."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from dagrl.data.prompts import PromptLoader, PromptSlice


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A slice that is being read, or has been."""

    position: int
    count: int
    prompts: Future[PromptSlice]


class ReadAhead:
    """The slices of a loader for consecutive positions; the next slice is read in the background."""

    def __init__(self, loader: PromptLoader) -> None:
        self._loader = loader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._ahead: _Ahead | None = None

    def take(self, position: int, count: int, *, first: Sequence[int] = ()) -> PromptSlice:
        """The same as `PromptLoader.take`."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            # Wait in any case, because the loader is not thread-safe.
            wait([ahead.prompts])
        if ahead is not None and not first and (ahead.position, ahead.count) == (position, count):
            taken = ahead.prompts.result()
        else:
            taken = self._loader.take(position, count, first=first)
        following = self._thread.submit(self._loader.take, taken.next_position, count)
        self._ahead = _Ahead(taken.next_position, count, following)
        return taken
