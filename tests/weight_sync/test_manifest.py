"""What travels is laid out once, the same on both sides."""

from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from dagrl.weight_sync.manifest import BucketLayout, Described, Manifest

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64])
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def groups(draw) -> list[list[Described]]:
    """Groups of tensors, each with a unique name."""
    sizes = draw(st.lists(st.integers(1, 3), max_size=8))
    names = iter(range(100))
    return [[(f"t{next(names)}", draw(DTYPES), draw(SHAPES)) for _ in range(size)] for size in sizes]


@given(groups(), st.integers(1, 3000))
def test_every_tensor_has_a_place_of_its_own_in_order(given, bucket_bytes):
    manifest = Manifest.cut(given, bucket_bytes)
    assert manifest.names == [name for group in given for name, *_ in group]
    for layout in manifest.buckets:
        end = 0
        for tensor in layout.tensors:
            assert tensor.offset >= end and tensor.offset % 64 == 0
            end = tensor.offset + tensor.nbytes
        assert end <= layout.nbytes <= manifest.buffer_sizes(1)[0]


@given(groups(), st.integers(1, 3000))
def test_groups_stay_together_and_buckets_are_filled(given, bucket_bytes):
    manifest = Manifest.cut(given, bucket_bytes)
    bucket_of = {t.name: index for index, layout in enumerate(manifest.buckets) for t in layout.tensors}
    assert all(len({bucket_of[name] for name, *_ in group}) == 1 for group in given)
    sizes = [sum(tensor.nbytes for tensor in layout.tensors) for layout in manifest.buckets]
    first = {bucket_of[group[0][0]]: size(group) for group in reversed(given)}
    for index, filled in enumerate(sizes):
        assert filled <= bucket_bytes or filled == first[index], "only a group that is alone is larger"
        assert index + 1 == len(sizes) or filled + first[index + 1] > bucket_bytes


@given(st.dictionaries(st.integers(0, 9), groups(), max_size=4), st.integers(1, 3000))
def test_owners_alternate_and_each_sends_its_own_tensors_once(given, bucket_bytes):
    manifest = Manifest.cut_by_owner(given, bucket_bytes)
    for owner, own in given.items():
        buckets = [replace(bucket, owner=0) for bucket in manifest.buckets if bucket.owner == owner]
        assert buckets == list(Manifest.cut(own, bucket_bytes).buckets)
    counts = Counter(bucket.owner for bucket in manifest.buckets)
    assert counts.keys() == {owner for owner, own in given.items() if own}
    turns: Counter[int] = Counter()
    for bucket in manifest.buckets:
        behind = min((turns[owner] for owner in counts if turns[owner] < counts[owner]), default=0)
        assert turns[bucket.owner] == behind, "no owner is ahead by more than a bucket"
        turns[bucket.owner] += 1
    other = Manifest.from_json(manifest.to_json())
    assert other == manifest and other.digest == manifest.digest


def size(group: list[Described]) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in group)


@given(groups(), st.integers(1, 3000), st.integers(1, 3))
def test_buffers_hold_their_buckets(given, bucket_bytes, buffers):
    manifest = Manifest.cut(given, bucket_bytes)
    buffer = manifest.buffer_sizes(buffers)
    assert len(buffer) == buffers and max(buffer) == manifest.buffer_sizes(1)[0]
    assert all(layout.nbytes <= buffer[index % buffers] for index, layout in enumerate(manifest.buckets))


@given(groups())
def test_a_round_trip_changes_nothing(given):
    manifest = Manifest.cut(given, 500)
    other = Manifest.from_json(manifest.to_json())
    assert other == manifest and other.digest == manifest.digest


@pytest.mark.parametrize(
    "other",
    [
        [("a", torch.float32, (4, 2))],
        [("b", torch.float32, (2, 4))],
        [("a", torch.int32, (2, 4))],
        [("a", torch.float32, (2, 4)), ("c", torch.uint8, ())],
    ],
    ids=["shape", "name", "dtype", "one more"],
)
def test_another_one_has_another_name(other):
    assert Manifest.cut([[("a", torch.float32, (2, 4))]], 99).digest != Manifest.cut([other], 99).digest


def test_views_are_in_the_buffer():
    layout = BucketLayout.of([("a", torch.bfloat16, (3,)), ("b", torch.float32, (2, 2)), ("c", torch.float32, ())])
    assert layout.nbytes == 192
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    views = dict(layout.views(buffer))
    assert {name: (view.dtype, tuple(view.shape)) for name, view in views.items()} == {
        "a": (torch.bfloat16, (3,)),
        "b": (torch.float32, (2, 2)),
        "c": (torch.float32, ()),
    }
    views["b"].fill_(1.0)
    assert buffer[64:80].view(torch.float32).tolist() == [1.0] * 4 and not buffer[:64].any() and not buffer[80:].any()


def test_without_tensors_there_is_still_something_to_send():
    assert BucketLayout.of([]).nbytes > 0
    assert Manifest.cut([], 10).buffer_sizes(1) == [0]
