import numpy as np
import pytest
import torch

from dagrl.data.batch import Batch, Column
from dagrl.spec.schema import ParallelSpec

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
    from dagrl.engines.megatron.micro_batch import row_alignment

    assert row_alignment(ParallelSpec.model_validate(parallel)) == alignment


def test_rows_lie_end_to_end_and_each_response_token_is_predicted_by_the_one_before_it() -> None:
    from dagrl.engines.megatron.micro_batch import split_batch

    (packed,) = split_batch(batch(([1, 2], [3, 4, 5]), ([6], [7])), tokens=20, alignment=4, device=CPU)
    assert packed.rows.tolist() == [0, 1]
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0, 6, 7, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]
    assert packed.sequences.cu_seqlens_q.tolist() == [0, 8, 12]
    assert packed.sequences.max_seqlen_q == 8
    assert packed.predicting.tolist() == [1, 2, 3, 8]
    assert packed.targets.tolist() == [3, 4, 5, 7]
    assert packed.row.tolist() == [0, 0, 0, 1]


def test_padding_counts_towards_the_budget() -> None:
    from dagrl.engines.megatron.micro_batch import split_batch

    rows = batch(([1], [2]), ([3], [4]))
    assert len(split_batch(rows, tokens=4, alignment=1, device=CPU)) == 1
    assert len(split_batch(rows, tokens=4, alignment=4, device=CPU)) == 2


def test_a_rank_without_rows_still_has_something_to_run() -> None:
    from dagrl.engines.megatron.micro_batch import split_batch

    (packed,) = split_batch(batch(), tokens=8, alignment=4, device=CPU)
    assert packed.input_ids.shape == (1, 4)
    assert len(packed.rows) == len(packed.predicting) == len(packed.targets) == len(packed.row) == 0
