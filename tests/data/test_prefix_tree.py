"""Sequences with common beginnings as a tree of runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.data.prefix_tree import GrowingTree, common_length, prefix_tree, sorted_order

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


def arrays(sequences: list[list[int]]) -> list[np.ndarray]:
    return [np.array(tokens, dtype=np.int64) for tokens in sequences]


def test_responses_to_a_prompt_share_it() -> None:
    tree = prefix_tree(arrays([[1, 2, 3, 7, 8], [1, 2, 3, 9], [5, 6]]))
    runs = {tuple(run.tolist()): int(parent) for run, parent in zip(tree.runs, tree.parents, strict=True)}
    prompt = next(i for i, run in enumerate(tree.runs) if run.tolist() == [1, 2, 3])
    assert runs == {(1, 2, 3): -1, (7, 8): prompt, (9,): prompt, (5, 6): -1}


def test_a_branch_shares_the_turns_before_it() -> None:
    tree = prefix_tree(arrays([[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 9]]))
    branches = [[tree.runs[run].tolist() for run in tree.path(int(end))] for end in tree.ends]
    assert branches == [[[1, 2], [3], [4, 5]], [[1, 2], [3], [6]], [[1, 2], [9]]]


def test_equal_sequences_and_continued_ones_end_at_shared_runs() -> None:
    tree = prefix_tree(arrays([[1, 2], [1, 2, 3], [1, 2]]))
    assert tree.ends[0] == tree.ends[2] == tree.parents[tree.ends[1]]
    assert tree.lengths.sum() == 3


@pytest.mark.parametrize(("least", "tokens"), [(1, 6), (2, 6), (3, 8)])
def test_a_run_is_shared_if_that_saves_enough(least: int, tokens: int) -> None:
    assert prefix_tree(arrays([[1, 2, 3, 4], [1, 2, 5, 6]]), least).lengths.sum() == tokens


@given(SEQUENCES, st.integers(1, 4))
def test_paths_spell_the_sequences(sequences: list[list[int]], least: int) -> None:
    tree = prefix_tree(arrays(sequences), least)
    for tokens, end in zip(sequences, tree.ends, strict=True):
        assert [token for run in tree.path(int(end)) for token in tree.runs[run].tolist()] == tokens
    assert (tree.parents < np.arange(len(tree.runs))).all(), "parents come first"
    assert (tree.lengths > 0).all()


@given(SEQUENCES, st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_a_growing_tree_knows_its_size(sequences: list[list[int]], least: int, alignment: int) -> None:
    tree, inserted = GrowingTree(least, alignment), []
    for tokens in sorted(sequences):
        inserted.append(np.array(tokens))
        tree.insert(inserted[-1])
        lengths = prefix_tree(inserted, least).lengths
        assert tree.size == (-(-lengths // alignment) * alignment).sum()


@given(SEQUENCES)
def test_each_prefix_is_stored_once(sequences: list[list[int]]) -> None:
    prefixes = {tuple(tokens[: end + 1]) for tokens in sequences for end in range(len(tokens))}
    assert prefix_tree(arrays(sequences)).lengths.sum() == len(prefixes)


@given(SEQUENCES)
def test_the_order_is_that_of_lists(sequences: list[list[int]]) -> None:
    assert [sequences[index] for index in sorted_order(arrays(sequences))] == sorted(sequences)


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_common_length(one: list[int], other: list[int]) -> None:
    length = common_length(np.array(one, dtype=np.int64), np.array(other, dtype=np.int64))
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]
