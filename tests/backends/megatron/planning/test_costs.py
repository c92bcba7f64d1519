"""What ranks that have slept connect again, as the engine was seen to meet in its groups on every layout here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from published_shapes import QWEN3_8B, QWEN3_30B

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.planning.costs import groups_of_pass, groups_of_update
from dagrl.backends.megatron.section import ParallelSpec

TIED = replace(QWEN3_8B, tied=True)


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
    assert groups_of_pass(shape, parallel, ranks) == of_a_pass
    assert groups_of_update(shape, parallel, ranks) == of_an_update
