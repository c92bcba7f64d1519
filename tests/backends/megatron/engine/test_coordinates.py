"""The plan's coordinates are those that a rank has once Megatron has made its groups."""

from __future__ import annotations

import pytest

from dagrl.backends.megatron.section import ParallelSpec, coordinates


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "expert_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    ],
    ids=["TP2 CP2 EP2 DP2", "PP2 EP2 ETP2 DP4"],
)
def test_ranks_are_where_the_plan_says(run_ranks, sizes):
    parallel = ParallelSpec(**sizes)

    def place(rank: int) -> tuple[int, ...]:
        from megatron.core import parallel_state as state

        from dagrl.backends.megatron.engine.distributed import RANK_ORDER

        state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
            order=RANK_ORDER,
        )
        return (
            state.get_tensor_model_parallel_rank(),
            state.get_context_parallel_rank(),
            state.get_data_parallel_rank(),
            state.get_pipeline_model_parallel_rank(),
            state.get_expert_tensor_parallel_rank(),
            state.get_expert_model_parallel_rank(),
            state.get_expert_data_parallel_rank(),
        )

    expected = [
        (each.tp, each.cp, each.dp, each.pp, each.etp, each.ep, each.expert_dp) for each in coordinates(parallel, 8)
    ]
    assert run_ranks(8, place) == expected
