"""The rank that sends a tensor is one that holds a part of it, in any layout."""

from unittest.mock import patch

import hypothesis.strategies as st
from hypothesis import given

from dagrl.backends.families.tensor_maps import MappedTensor, Replicated
from dagrl.backends.megatron.section import ParallelSpec, coordinates

NORM = MappedTensor("norm", ("norm",), ((8,),), Replicated())
POWERS = st.sampled_from([1, 2, 4])


@st.composite
def layouts(draw) -> tuple[ParallelSpec, int]:
    """A layout, and a number of ranks that it divides."""
    tensor, context, stages, experts, expert_tensor = (draw(POWERS) for _ in range(5))
    parallel = ParallelSpec(
        tensor_model_parallel_size=tensor,
        context_parallel_size=context,
        pipeline_model_parallel_size=stages,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=expert_tensor,
    )
    return parallel, max(tensor * context, experts * expert_tensor) * draw(POWERS) * stages


@given(layouts())
def test_the_first_rank_that_holds_a_part_owns_a_tensor(layout):
    from dagrl.backends.megatron.engine import weight_plan

    parallel, ranks = layout
    places = coordinates(parallel, ranks)
    state = "dagrl.backends.megatron.engine.weight_plan.parallel_state"
    with (
        patch("torch.distributed.get_world_size", lambda: ranks),
        patch(f"{state}.get_pipeline_model_parallel_world_size", lambda: parallel.pipeline_model_parallel_size),
        patch(f"{state}.get_expert_tensor_parallel_world_size", lambda: parallel.expert_tensor_parallel_size),
    ):
        for stage in range(parallel.pipeline_model_parallel_size):
            for expert_rank in (None, *range(parallel.expert_model_parallel_size)):
                owner = weight_plan.owner_of(weight_plan.PlannedTensor(NORM, (8,), 1, stage, expert_rank))
                holders = [
                    rank for rank, place in enumerate(places) if place.pp == stage and expert_rank in (None, place.ep)
                ]
                assert owner == holders[0]
