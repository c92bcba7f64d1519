"""Packs rows into micro-batches of at most a token budget: few, and of similar size.

Pure numpy; engines call it on the rows of one data-parallel rank.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from dagrl.data.prefix_tree import GrowingTree, common_length, sorted_order


def pack(lengths: np.ndarray, budget: int, at_least: int = 1, groups: np.ndarray | None = None) -> list[np.ndarray]:
    """Split rows of `lengths` tokens, all positive, into micro-batches of at most `budget` tokens.

    Rows are placed longest first, each into the lightest micro-batch (Graham's LPT rule), with as few micro-batches as
    the rule allows, but `at_least` that many, or one per row if there are fewer rows. Returns the row positions of
    each, ascending; each row is in exactly one. The heaviest comes first, so that a micro-batch that exceeds memory
    fails at once. The result is deterministic. Raises ValueError if a row is longer than the budget.

    With `groups`, any integers, rows of equal group are kept together.
    """
    if len(lengths) == 0:
        return []
    assert lengths.min() > 0, "a row without tokens cannot be packed"
    if groups is not None:
        return _pack_groups(lengths, budget, at_least, groups)
    longest = int(np.argmax(lengths))
    if lengths[longest] > budget:
        raise ValueError(_too_long(f"row {longest} has {lengths[longest]}", budget))
    fewest = min(max(math.ceil(lengths.sum() / budget), at_least), len(lengths))
    for count in range(fewest, len(lengths) + 1):
        loads, bins = _spread(lengths, count)
        if max(loads) <= budget:
            order = sorted(range(count), key=lambda i: (-loads[i], bins[i]))
            return [np.array(sorted(bins[i]), dtype=np.int64) for i in order]
    raise AssertionError("one row per micro-batch always fits")


def pack_shared(
    rows: Sequence[np.ndarray],
    budget: int,
    at_least: int = 1,
    groups: np.ndarray | None = None,
    *,
    alignment: int,
    least: int,
) -> list[np.ndarray]:
    """Like `pack`, for rows of tokens whose prefixes are computed once in a micro-batch; see `prefix_tree`.

    Rows that share a prefix stay together as far as the budget allows. Runs of tokens are padded to multiples of
    `alignment`, and rows share a prefix of `least` tokens or more.
    """
    alone = np.array([-(-len(row) // alignment) * alignment for row in rows], dtype=np.int64)
    if alone.max() > budget:
        return pack(alone, budget, at_least, groups)  # Raises the error.
    order = np.array(sorted_order(rows), dtype=np.int64)
    if groups is not None:
        order = order[np.argsort(groups[order], kind="stable")]
    parts: list[list[int]] = []
    trees: list[GrowingTree] = []
    for place, row in enumerate(order.tolist()):
        before = int(order[place - 1])
        if not place:
            joins = False
        elif groups is not None:
            joins = groups[before] == groups[row]
        else:
            shares = common_length(rows[before], rows[row]) >= least
            joins = shares and trees[-1].size + trees[-1].growth(rows[row]) <= budget
        if not joins:
            parts.append([])
            trees.append(GrowingTree(least, alignment))
        parts[-1].append(row)
        trees[-1].insert(rows[row])
    loads = np.array([tree.size for tree in trees], dtype=np.int64)
    if groups is not None and loads.max() > budget:
        return _pack_groups(alone, budget, at_least, groups)  # Raises the error.
    members = [np.array(sorted(part), dtype=np.int64) for part in parts]
    together = [np.sort(np.concatenate([members[part] for part in some])) for some in pack(loads, budget, at_least)]
    # Splitting runs can cost more padding than it saves.
    fit = all(_tree_size([rows[row] for row in some], least, alignment) <= budget for some in together)
    return together if fit else [members[part] for part in np.argsort(-loads, kind="stable")]


def _tree_size(rows: Sequence[np.ndarray], least: int, alignment: int) -> int:
    tree = GrowingTree(least, alignment)
    for row in sorted_order(rows):
        tree.insert(rows[row])
    return tree.size


def _pack_groups(lengths: np.ndarray, budget: int, at_least: int, groups: np.ndarray) -> list[np.ndarray]:
    _, group_of_row = np.unique(groups, return_inverse=True)
    tokens = np.bincount(group_of_row, lengths).astype(np.int64)
    longest = int(np.argmax(tokens))
    if tokens[longest] > budget:
        rows = np.flatnonzero(group_of_row == longest).tolist()
        named = ", ".join(map(str, rows))
        raise ValueError(_too_long(f"rows {named}, which belong together, have {tokens[longest]}", budget))
    return [np.flatnonzero(np.isin(group_of_row, chosen)) for chosen in pack(tokens, budget, at_least)]


def _too_long(rows: str, budget: int) -> str:
    remedy = "raise tokens_per_micro_batch or shorten prompts and responses"
    return f"{rows} tokens, more than the {budget} of a micro-batch; {remedy}"


def _spread(lengths: np.ndarray, count: int) -> tuple[list[int], list[list[int]]]:
    """Loads and rows of `count` bins: longest row first, into the lightest bin; ties go to the lower index."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, i) for i in range(count)]
    for row in np.argsort(-lengths, kind="stable").tolist():
        load, lightest = heap[0]
        bins[lightest].append(row)
        heapq.heapreplace(heap, (load + int(lengths[row]), lightest))
    loads = [0] * count
    for load, i in heap:
        loads[i] = load
    return loads, bins
