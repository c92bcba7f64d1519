"""What ranks that have slept connect again, as the engine was seen to meet in its groups on every layout here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from published_shapes import QWEN3_8B, QWEN3_30B

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.planning.communicators import closing_seconds, connecting_seconds, gathering_seconds
from dagrl.backends.megatron.section import ParallelSpec

TIED = replace(QWEN3_8B, tied=True)
ONE = connecting_seconds(QWEN3_8B, ParallelSpec(tensor_model_parallel_size=2), 2, updates=False)


@pytest.mark.parametrize(
    ("shape", "ranks", "sizes", "of_a_pass", "of_an_update"),
    [
        (TIED, 1, {}, 0, 0),
        (QWEN3_8B, 2, {}, 0, 3),
        (QWEN3_8B, 2, {"tensor": 2}, 1, 1),
        (QWEN3_8B, 2, {"pipeline": 2}, 1, 1),
        (TIED, 2, {"pipeline": 2}, 1, 2),
        (QWEN3_8B, 2, {"context": 2}, 1, 2),
        (QWEN3_8B, 4, {"tensor": 2, "pipeline": 2}, 2, 1),
        (QWEN3_8B, 4, {"tensor": 2}, 1, 3),
        (QWEN3_30B, 2, {}, 1, 2),
        (QWEN3_30B, 2, {"tensor": 2}, 1, 2),
        (QWEN3_30B, 2, {"tensor": 2, "expert_tensor": 2}, 3, 1),
        (QWEN3_30B, 2, {"expert": 2}, 3, 2),
        (QWEN3_30B, 4, {"pipeline": 2, "expert": 2}, 4, 2),
        (QWEN3_30B, 2, {"tensor": 2, "expert": 2}, 3, 1),
        (QWEN3_30B, 4, {"tensor": 2, "expert": 2}, 4, 3),
        (QWEN3_30B, 4, {"tensor": 2, "expert": 2, "expert_tensor": 2}, 5, 2),
    ],
)
def test_each_group_that_ranks_meet_in_is_connected(
    shape: ModelShape, ranks: int, sizes: dict[str, int], of_a_pass: int, of_an_update: int
) -> None:
    model = ("tensor", "pipeline", "expert")
    fields = {f"{name}{'_model' if name in model else ''}_parallel_size": size for name, size in sizes.items()}
    parallel = ParallelSpec(sequence_parallel=sizes.get("tensor", 1) > 1, **fields)
    assert connecting_seconds(shape, parallel, ranks, updates=False) == pytest.approx(of_a_pass * ONE)
    assert connecting_seconds(shape, parallel, ranks, updates=True) == pytest.approx(of_an_update * ONE)


def test_a_rank_alone_has_nothing_to_close_or_to_gather() -> None:
    assert closing_seconds(1) == gathering_seconds(1) == 0
    assert closing_seconds(2) > 0 < gathering_seconds(2)
