"""Which groups a replay buffer keeps, returns and drops: pure functions of its index, the step and the seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dagrl.config.schema import BufferNode

_GIB = 2**30
_STREAM = 0xB0FF
"""Sets its random numbers apart from others that are drawn from the same seed."""


class Entry(NamedTuple):
    """One group in a buffer."""

    step: int
    """The step that has sampled it."""
    group: int
    """Its number in that step."""
    file: int
    """The step whose file holds it."""
    place: int
    """Its row group in that file."""
    in_file: int
    """Groups of that file when it was written."""
    rows: int
    nbytes: int
    """Size of its columns, before compression."""
    version: int
    """Version of the oldest weights that have sampled it."""
    prompt: str
    mean: float
    """Mean of the metric over its samples."""
    spread: float
    """Mean distance of the metric from its mean: the mean absolute advantage."""
    right: float
    uses: int = 0


def admitted(entries: Iterable[Entry], node: BufferNode) -> list[Entry]:
    """Those of a step's new groups that the buffer takes."""
    return [entry for entry in entries if _is_admitted(entry, node)]


def chosen(entries: Sequence[Entry], node: BufferNode, *, step: int, seed: int) -> list[Entry]:
    """The groups that return to `step`, oldest first; fewer than ``groups_per_step`` if there are not so many."""
    fitting = [entry for entry in entries if _is_fit(entry, node, step)]
    draw = np.random.default_rng((seed, step, _STREAM))
    if node.policy == "fifo":
        places = sorted(range(len(fitting)), key=lambda place: (fitting[place].uses, *_age(fitting[place])))
    elif node.policy == "prioritised":
        places = _by_weight(np.array([_log_weight(entry, node) for entry in fitting]), draw)
    else:
        places = draw.permutation(len(fitting)).tolist()
    return sorted((fitting[place] for place in places[: node.groups_per_step]), key=_age)


def kept(entries: Iterable[Entry], node: BufferNode, *, step: int) -> list[Entry]:
    """The groups that stay after `step`, oldest first: those that may return to a later one, within the capacity."""
    fitting = sorted((entry for entry in entries if _is_fit(entry, node, step + 1)), key=_age)
    if node.policy == "best":
        best: dict[str, Entry] = {}
        for entry in fitting:
            if entry.prompt not in best or entry.mean >= best[entry.prompt].mean:
                best[entry.prompt] = entry
        fitting = sorted(best.values(), key=_age)
    order = sorted(fitting, key=lambda entry: (_priority(entry, node), *_age(entry)))
    if node.policy != "prioritised":
        order = fitting
    rows, nbytes = sum(entry.rows for entry in order), sum(entry.nbytes for entry in order)
    dropped = set()
    for entry in order:
        if (node.capacity is None or rows <= node.capacity) and nbytes <= node.capacity_gib * _GIB:
            break
        dropped.add(_age(entry))
        rows, nbytes = rows - entry.rows, nbytes - entry.nbytes
    return [entry for entry in fitting if _age(entry) not in dropped]


def _is_admitted(entry: Entry, node: BufferNode) -> bool:
    if not np.isfinite(entry.mean) or (node.keep == "varied" and not entry.spread > 0):
        return False
    return node.policy != "successes" or 0 < entry.right < node.hard_below


def _is_fit(entry: Entry, node: BufferNode, step: int) -> bool:
    """Whether a group may return to `step`, which trains the weights of version ``step - 1``."""
    if node.max_uses is not None and entry.uses >= node.max_uses:
        return False
    return node.max_age is None or step - 1 - entry.version <= node.max_age


def _age(entry: Entry) -> tuple[int, int]:
    return entry.step, entry.group


def _priority(entry: Entry, node: BufferNode) -> float:
    return max(entry.spread if node.priority == "advantage" else entry.mean, node.floor)


def _log_weight(entry: Entry, node: BufferNode) -> float:
    priority = _priority(entry, node)
    return node.exponent * math.log(priority) if priority > 0 else -math.inf


def _by_weight(log_weights: np.ndarray, draw: np.random.Generator) -> list[int]:
    """A weighted random order without those of weight 0: by log-weights with Gumbel noise.

    Kool et al., "Stochastic beams and where to find them", 2019 (arXiv 1903.06059): the same as to draw one after the
    other, in proportion to the weights of those that are left.
    """
    noise = draw.gumbel(size=len(log_weights))
    positive = np.flatnonzero(log_weights > -np.inf)
    return positive[np.argsort(-(log_weights[positive] + noise[positive]), kind="stable")].tolist()
