"""Splitting and joining of tensors: by hand where the order matters, by property for every layout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dagrl.backends.families.tensor_maps import (
    GroupedQkv,
    Parallel,
    Repeated,
    Replicated,
    Sections,
    TensorMap,
    VocabParallel,
    join,
)


def rows(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def test_queries_precede_the_key_and_value_of_their_group():
    # Two groups of two heads of one channel.
    qkv, full = GroupedQkv(groups=2, head_dim=1), [rows(0, 1, 2, 3), rows(10, 11), rows(20, 21)]
    assert qkv.shard(full, 0, 1).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert qkv.shard(full, 1, 2).tolist() == [2, 3, 11, 21]
    # Four ranks share two key heads.
    assert [qkv.shard(full, part, 4).tolist() for part in range(4)] == [[0, 1], [10, 20], [2, 3], [11, 21]]


def test_gates_of_a_group_follow_its_queries():
    # Published: query and gate of a head, head by head. Two groups of two heads of one channel.
    full = [rows(0, 50, 1, 51, 2, 52, 3, 53), rows(10, 11), rows(20, 21)]
    qkv = GroupedQkv(groups=2, head_dim=1, gated=True)
    assert qkv.shard(full, 0, 1).tolist() == [0, 1, 50, 51, 10, 20, 2, 3, 52, 53, 11, 21]
    assert qkv.shard(full, 1, 4).tolist() == [51, 10, 20]


def test_each_rank_has_its_part_of_each_section():
    # Queries and keys of two channels and values of four in one tensor, gates of four in another.
    sections = Sections(((2, 2, 4), (4,)), ("query", "key", "value", "z"))
    full = [rows(0, 1, 10, 11, 20, 21, 22, 23), rows(30, 31, 32, 33)]
    assert sections.shard(full, 1, 2).tolist() == [1, 11, 22, 23, 32, 33]
    assert sections.sections == {"query": 2, "key": 2, "value": 4, "z": 4}


def test_each_rank_has_its_part_of_the_gate_above_its_part_of_the_up_projection():
    full = [rows(0, 1, 2, 3), rows(10, 11, 12, 13)]
    assert [Parallel(dim=0).shard(full, part, 2).tolist() for part in (0, 1)] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_a_vocabulary_is_filled_up_with_zeros():
    vocabulary = VocabParallel(rows=3, padded_rows=8)
    shards = [vocabulary.shard([rows(7, 8, 9)], part, 4).tolist() for part in range(4)]
    assert shards == [[7, 8], [9, 0], [0, 0], [0, 0]]


def test_sizes_that_ranks_cannot_share_are_a_bug():
    with pytest.raises(AssertionError, match="3 ranks cannot share"):
        Parallel(dim=0).shard([torch.zeros(4, 2)], 0, 3)


@st.composite
def maps(draw) -> tuple[TensorMap, list[torch.Tensor], int]:
    """A map, full tensors that it fits, and a number of ranks."""
    parts, each, width = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_dim, queries = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    groups, rest = parts * each, draw(st.sampled_from([(), (width,)]))
    kinds = ["replicated", "column", "row", "gate-up", "qkv", "shared keys", "gated", "shared keys and gates"]
    kind = draw(st.sampled_from([*kinds, "sections", "vocabulary", "repeated"]))
    vocabulary = draw(st.integers(1, parts * each))
    tensor_map, shapes = {
        "replicated": (Replicated(), [(each, *rest)]),
        "column": (Parallel(dim=0), [(parts * each, *rest)]),
        "row": (Parallel(dim=1), [(width, parts * each)]),
        "gate-up": (Parallel(dim=0), [(parts * each, width)] * 2),
        "qkv": (GroupedQkv(groups, head_dim), [(groups * n * head_dim, *rest) for n in (queries, 1, 1)]),
        # As many ranks as there are channels in a head, for one group.
        "shared keys": (GroupedQkv(each, parts), [(each * n * parts, *rest) for n in (queries, 1, 1)]),
        "gated": (GroupedQkv(groups, head_dim, True), [(groups * n * head_dim, *rest) for n in (2 * queries, 1, 1)]),
        "shared keys and gates": (
            GroupedQkv(each, parts, True),
            [(each * n * parts, *rest) for n in (2 * queries, 1, 1)],
        ),
        "sections": (
            Sections(((groups, parts * queries), (parts,)), ("one", "two", "three")),
            [(groups + parts * queries, *rest), (parts, *rest)],
        ),
        "vocabulary": (VocabParallel(vocabulary, parts * each), [(vocabulary, width)]),
        "repeated": (Repeated(Parallel(dim=0)), [(parts * each, width)]),
    }[kind]
    full = [torch.randn(shape) for shape in shapes]
    return tensor_map, full * 3 if kind == "repeated" else full, parts


@given(maps())
def test_joining_the_shards_gives_the_full_tensors_back(sample):
    tensor_map, full, parts = sample
    shards = [tensor_map.shard(full, part, parts) for part in range(parts)]
    assert len({shard.shape for shard in shards}) == 1, "every rank holds as much"
    shapes = [tuple(tensor.shape) for tensor in full]
    assert tensor_map.shard_shape(shapes, parts) == tuple(shards[0].shape)
    joined = join(tensor_map, shards, shapes)
    assert len(joined) == len(full)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(joined, full, strict=True))
    pieces = tensor_map.pieces(joined, shards)
    assert sum(place.numel() for place, _ in pieces) == sum(tensor.numel() for tensor in full), "each element once"
