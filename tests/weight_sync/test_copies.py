"""Planned copies do what copying view by view does, in fewer calls."""

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from dagrl.weight_sync.copies import ByteCopy, CopyPlan, coalesced
from dagrl.weight_sync.staging import ReleasableBuffer

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64]


@st.composite
def pairs(draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of two memories, at any offsets, some of them strided or of two dtypes."""
    made = []
    for _ in range(draw(st.integers(0, 8))):
        rows, columns = draw(st.integers(0, 4)), draw(st.integers(0, 4))
        held, sent = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
        kind = draw(st.sampled_from(["same", "same", "dtypes", "strided"]))
        target = torch.zeros(rows, columns, dtype=held)
        if kind == "strided":
            source = torch.randint(0, 9, (rows, columns + 2)).to(held)[:, 1 : columns + 1]
        else:
            source = torch.randint(0, 9, (rows, columns)).to(sent if kind == "dtypes" else held)
        made.append((target, source))
    return made


@settings(max_examples=60, deadline=None)
@given(pairs())
def test_they_do_what_single_copies_do(given):
    copies = CopyPlan(given)
    for _ in range(2):
        copies.run()
        assert all(torch.equal(target, source.to(target.dtype)) for target, source in given)
        for target, source in given:
            target.zero_()
            source += 1


def test_neighbours_on_both_sides_are_one_copy():
    target, source = torch.zeros(40), torch.arange(40.0)
    copies = CopyPlan([(target[at : at + 8], source[at : at + 8]) for at in (16, 0, 8, 24)])
    assert len(copies) == 1
    copies.run()
    assert target.tolist() == [*range(32), *[0] * 8]


def test_neighbours_on_one_side_only_are_not():
    runs = [ByteCopy(1, 0, 2, 0, 8), ByteCopy(1, 16, 2, 8, 8), ByteCopy(3, 24, 2, 16, 8), ByteCopy(3, 32, 2, 24, 0)]
    assert coalesced(reversed(runs)) == runs[:3]


def test_odd_bytes_move_too():
    target, source = torch.zeros(11, dtype=torch.uint8), torch.arange(11, dtype=torch.uint8)
    CopyPlan([(target[1:10], source[2:11]), (target[:1], source[:1])]).run()
    assert target.tolist() == [0, *range(2, 11), 0]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(1, 60)), max_size=8))
def test_runs_are_seen_as_numbers_that_fit(given):
    for to, start, nbytes in given:
        width = ByteCopy(0, to, 1, start, nbytes).width
        assert not (to % width or start % width or nbytes % width)
        assert width == 8 or to % (2 * width) or start % (2 * width) or nbytes % (2 * width)


def test_copies_outlive_the_absence_of_their_memory():
    buffer, target = ReleasableBuffer(64, "cpu"), torch.zeros(8)
    copies = CopyPlan([(target, buffer.bytes.view(torch.float32)[4:12])])
    buffer.release()
    assert not buffer.is_allocated and buffer.bytes.untyped_storage().nbytes() == 0
    buffer.allocate()
    buffer.allocate()
    buffer.bytes.view(torch.float32).copy_(torch.arange(16.0))
    copies.run()
    assert target.tolist() == list(range(4, 12))


def test_an_empty_buffer():
    buffer = ReleasableBuffer(0, "cpu")
    buffer.release()
    assert buffer.is_allocated and len(buffer.bytes) == 0
