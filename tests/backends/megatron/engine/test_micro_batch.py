from typing import Any

import numpy as np
import pytest
import torch

from dagrl.backends.megatron.section import ParallelSpec
from dagrl.data.batch import Batch, Column

CPU = torch.device("cpu")


def batch(*rows: tuple[list[int], list[int]]) -> Batch:
    return Batch(
        np.arange(len(rows)),
        {
            "prompt_tokens": Column.ragged([prompt for prompt, _ in rows], "int64"),
            "response_tokens": Column.ragged([response for _, response in rows], "int64"),
        },
    )


@pytest.mark.parametrize(
    ("parallel", "alignment"),
    [
        ({}, 1),
        ({"tensor_model_parallel_size": 4}, 1),
        ({"tensor_model_parallel_size": 4, "sequence_parallel": True}, 4),
        ({"context_parallel_size": 2}, 4),
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}, 8),
    ],
)
def test_rows_are_aligned_to_what_ranks_share_out(parallel: dict[str, int], alignment: int) -> None:
    assert ParallelSpec.model_validate(parallel).row_alignment == alignment


def packed(rows: Batch, *, tokens: int, at_least: int = 1, **packing: Any) -> list[Any]:
    from dagrl.backends.megatron.engine.micro_batch import Packing

    how = Packing(**packing)
    return [how.micro_batch(rows, some, CPU) for some in how.bins(rows, tokens, at_least)]


def test_rows_are_packed_and_each_response_token_is_predicted_by_the_one_before_it() -> None:
    (pack,) = packed(batch(([1, 2], [3, 4, 5]), ([6], [7])), tokens=20, alignment=4)
    assert pack.rows.tolist() == [0, 1]
    assert pack.input_ids.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0, 6, 7, 0, 0]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]
    assert pack.sequences.cu_seqlens_q.tolist() == [0, 8, 12]
    assert pack.sequences.max_seqlen_q == 8
    assert pack.reading.tolist() == [1, 2, 3, 8]
    assert pack.targets.tolist() == [3, 4, 5, 7]
    assert pack.own is None
    assert pack.row.tolist() == [0, 0, 0, 1]


def test_context_parallel_ranks_hold_chunks_from_both_ends_of_each_row_and_read_what_they_hold() -> None:
    rows = batch(([1, 2], [3, 4, 5]), ([6], [7]))
    (first,), (second,) = (packed(rows, tokens=20, alignment=4, context_rank=rank, context_ranks=2) for rank in (0, 1))
    assert first.input_ids.tolist() == [[1, 2, 0, 0, 6, 0]]
    assert second.input_ids.tolist() == [[3, 4, 5, 0, 7, 0]]
    assert first.position_ids.tolist() == [[0, 1, 6, 7, 0, 3]]
    assert first.sequences.cu_seqlens_q.tolist() == [0, 8, 12], "the whole pack's"
    # Responses are read at tokens 2, 3, 4 of the first row and 6 of the second.
    assert (first.reading.tolist(), first.targets.tolist(), first.own.tolist()) == ([1, 4], [3, 7], [0, 3])
    assert (second.reading.tolist(), second.targets.tolist(), second.own.tolist()) == ([0, 1], [4, 5], [1, 2])
    assert first.row.tolist() == second.row.tolist() == [0, 0, 0, 1]


def test_a_score_is_read_at_the_end_of_each_row() -> None:
    (pack,) = packed(batch(([1, 2], [3, 4, 5]), ([6], [])), tokens=20, alignment=4, at_row_end=True)
    assert pack.reading.tolist() == [4, 8]
    assert pack.row.tolist() == [0, 1]


def test_rows_that_share_a_prompt_have_it_once() -> None:
    rows = batch(([1, 2, 3], [4, 5]), ([1, 2, 3], [6]), ([9], [8]))
    (pack,) = packed(rows, tokens=20, alignment=2, shared_prefix=3)
    assert pack.input_ids.tolist() == [[1, 2, 3, 0, 4, 5, 6, 0, 9, 8]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 3, 3, 4, 3, 4, 0, 1]]
    assert pack.sequences.attention.cu_seqlens_q.tolist() == [0, 4, 6, 8, 10]
    assert pack.sequences.keys.tolist() == [0, 1, 2, 3, *[0, 1, 2], 4, 5, *[0, 1, 2], 6, 7, 8, 9]
    outputs = list(zip(pack.reading.tolist(), pack.targets.tolist(), strict=True))
    assert [outputs[output] for output in pack.repeats.output.tolist()] == [(2, 4), (4, 5), (2, 6), (8, 8)]
    assert pack.row.tolist() == [0, 0, 1, 2]


def test_branches_read_what_they_share_once() -> None:
    rows = batch(([1], [2, 3, 4]), ([1], [2, 3, 5]))
    (pack,) = packed(rows, tokens=20, alignment=1, shared_prefix=2)
    assert pack.tokens == 5
    outputs = list(zip(pack.reading.tolist(), pack.targets.tolist(), strict=True))
    assert [outputs[output] for output in pack.repeats.output.tolist()] == [
        (0, 2),
        (1, 3),
        (2, 4),
        (0, 2),
        (1, 3),
        (2, 5),
    ]
    assert pack.outputs == 4
    # Some of the outputs, and the positions in row order that have them.
    position, place = pack.positions(slice(1, 3))
    assert sorted(outputs[1 + output] for output in place.tolist()) == sorted(2 * [outputs[1]] + [outputs[2]])
    assert position.tolist() == sorted(position.tolist())
    assert pack.repeats.output[position].tolist() == (place + 1).tolist()


def test_rows_of_other_temperatures_share_no_output() -> None:
    rows = batch(([1], [2, 3]), ([1], [2, 3]), ([1], [2, 3]))
    heated = rows.with_columns({"temperature": Column(np.array([1.5, 0.5, 1.5], dtype=np.float32))})
    (pack,) = packed(heated, tokens=20, alignment=1, shared_prefix=2)
    reads = list(zip(*(each.tolist() for each in (pack.reading, pack.targets, pack.temperature)), strict=True))
    hot, cold = [(0, 2, 1.5), (1, 3, 1.5)], [(0, 2, 0.5), (1, 3, 0.5)]
    assert [reads[output] for output in pack.repeats.output.tolist()] == [*hot, *cold, *hot]
    assert pack.outputs == 4
    (plain,) = packed(rows, tokens=20, alignment=1, shared_prefix=2)
    assert (plain.outputs, plain.temperature) == (2, None)


def test_rows_without_a_common_prefix_are_packed_as_ever() -> None:
    rows = batch(([1, 2], [3]), ([4], [5]))
    (pack,) = packed(rows, tokens=20, alignment=1, shared_prefix=2)
    assert (pack.sequences.cu_seqlens_q.tolist(), pack.repeats) == ([0, 3, 5], None)


def test_padding_counts_towards_the_budget() -> None:
    rows = batch(([1], [2]), ([3], [4]))
    assert len(packed(rows, tokens=4, alignment=1)) == 1
    assert len(packed(rows, tokens=4, alignment=4)) == 2


def test_rows_are_spread_over_as_many_micro_batches_as_asked_for() -> None:
    rows = batch(([1], [2]), ([3], [4]), ([5], [6, 7]))
    assert [pack.rows.tolist() for pack in packed(rows, tokens=20, alignment=1, at_least=2)] == [[0, 1], [2]]
    assert len(packed(rows, tokens=20, alignment=1, at_least=5)) == 3, "a row is never cut"


def test_a_rank_without_rows_still_has_something_to_run() -> None:
    from dagrl.backends.megatron.engine.micro_batch import Packing

    assert packed(batch(), tokens=8, alignment=4) == []
    pack = Packing(4).micro_batch(batch(), np.arange(0), CPU)
    assert pack.input_ids.shape == (1, 4)
    assert len(pack.rows) == len(pack.reading) == len(pack.targets) == len(pack.row) == 0
