"""Token sequences as a tree of runs: common prefixes are stored once.

Responses to one prompt share it, and branches of a conversation share their history. Engines pack the runs of a tree
instead of whole rows. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Runs of tokens. A sequence is the path from a run without parent to the run at which it ends."""

    runs: tuple[np.ndarray, ...]
    """Tokens of each run; a parent comes before its children."""
    parents: np.ndarray
    """The parent of each run, int64 [runs]; -1 at the start of a sequence."""
    ends: np.ndarray
    """The last run of each sequence, int64 [sequences]."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each run, int64 [runs]."""
        return np.array([len(run) for run in self.runs], dtype=np.int64)

    def path(self, run: int) -> list[int]:
        """The runs from the beginning of a sequence up to `run`, which is the last."""
        path = [run]
        while (parent := int(self.parents[path[-1]])) >= 0:
            path.append(parent)
        return path[::-1]


def prefix_tree(sequences: Sequence[np.ndarray], least: int = 1) -> PrefixTree:
    """The tree of non-empty integer sequences. Sequences share a run only if that saves at least `least` tokens.

    In sorted order each sequence shares its prefix with the previous one, so that one comparison for each suffices.
    """
    tree = GrowingTree(least)
    ends = np.zeros(len(sequences), dtype=np.int64)
    for index in sorted_order(sequences):
        ends[index] = tree.insert(sequences[index])
    return tree.finished(ends)


def sorted_order(sequences: Sequence[np.ndarray]) -> list[int]:
    # Big-endian bytes of non-negative integers compare as the integers do.
    keys = [np.asarray(tokens).astype(">u8").tobytes() for tokens in sequences]
    return sorted(range(len(sequences)), key=lambda index: keys[index])


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


class GrowingTree:
    """A tree to which sequences are added in lexicographic order."""

    def __init__(self, least: int, alignment: int = 1) -> None:
        """See `prefix_tree`. Runs are padded to multiples of `alignment`."""
        self._least, self._alignment = least, alignment
        self._tokens: list[np.ndarray] = []
        self._parents: list[int] = []
        self._path: list[int] = []
        """Runs of the newest sequence."""
        self._newest = np.zeros(0, dtype=np.int64)
        self.size = 0
        """Tokens of all runs, with padding."""

    def growth(self, tokens: np.ndarray) -> int:
        return self._growth(len(tokens), *self._shared(tokens))

    def insert(self, tokens: np.ndarray) -> int:
        """Insert a sequence; returns the run at which it ends."""
        kept, cut = self._shared(tokens)
        self.size += self._growth(len(tokens), kept, cut)
        path = self._path[:kept]
        if cut:
            path.append(self._split(self._path[kept], cut))
        start = sum(len(self._tokens[run]) for run in path)
        if start < len(tokens):
            path.append(self._add(tokens[start:], path[-1] if path else -1))
        self._path, self._newest = path, tokens
        return path[-1]

    def _growth(self, length: int, kept: int, cut: int) -> int:
        """Insert a sequence of that length, given the result of `_shared`."""
        start = sum(len(self._tokens[run]) for run in self._path[:kept])
        more = self._padded(length - start - cut)
        if cut:
            whole = len(self._tokens[self._path[kept]])
            more += self._padded(cut) + self._padded(whole - cut) - self._padded(whole)
        return more

    def _shared(self, tokens: np.ndarray) -> tuple[int, int]:
        """Number of runs of the newest sequence that another one shares, and of shared tokens of the next run."""
        shared, start = common_length(self._newest, tokens), 0
        for kept, run in enumerate(self._path):
            end = start + len(self._tokens[run])
            if end > shared:
                return kept, shared - start if shared - start >= self._least else 0
            start = end
        return len(self._path), 0

    def _padded(self, length: int) -> int:
        return -(-length // self._alignment) * self._alignment

    def finished(self, ends: np.ndarray) -> PrefixTree:
        """The tree, with runs in an order in which parents come first."""
        depth_first = self._depth_first()
        number = np.zeros(len(depth_first), dtype=np.int64)
        number[depth_first] = np.arange(len(depth_first))
        parents = np.array([self._parents[run] for run in depth_first], dtype=np.int64)
        renumbered = np.where(parents >= 0, number[parents], -1)
        return PrefixTree(tuple(self._tokens[run] for run in depth_first), renumbered, number[ends])

    def _add(self, tokens: np.ndarray, parent: int) -> int:
        self._tokens.append(tokens)
        self._parents.append(parent)
        return len(self._tokens) - 1

    def _split(self, run: int, length: int) -> int:
        """Split a run after its first `length` tokens, which become its parent; returns the parent.

        The rest keeps its number, so that the paths of sequences that end in it stay valid.
        """
        first = self._add(self._tokens[run][:length], self._parents[run])
        self._tokens[run], self._parents[run] = self._tokens[run][length:], first
        return first

    def _depth_first(self) -> list[int]:
        children: dict[int, list[int]] = {}
        for run, parent in enumerate(self._parents):
            children.setdefault(parent, []).append(run)
        order: list[int] = []
        waiting = children.get(-1, [])[::-1]
        while waiting:
            run = waiting.pop()
            order.append(run)
            waiting.extend(children.get(run, [])[::-1])
        return order
