"""Ranks and their places in a layout."""

from __future__ import annotations

import pytest

from dagrl.plan.coordinates import coordinates
from dagrl.spec.schema import ParallelSpec


def test_tensor_parallel_ranks_are_neighbours_then_context_then_data_then_pipeline():
    parallel = ParallelSpec(tensor_model_parallel_size=2, context_parallel_size=2, pipeline_model_parallel_size=2)
    places = [(place.tp, place.cp, place.dp, place.pp) for place in coordinates(parallel, 16)]
    assert places[:5] == [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0), (0, 0, 1, 0)]
    assert places[8] == (0, 0, 0, 1)
    assert len(set(places)) == 16


@pytest.mark.parametrize(("tp", "cp", "pp", "dp"), [(1, 1, 1, 4), (2, 1, 1, 2), (2, 2, 2, 3), (1, 4, 2, 1)])
def test_one_rank_of_each_replica_hands_in(tp, cp, pp, dp):
    parallel = ParallelSpec(tensor_model_parallel_size=tp, context_parallel_size=cp, pipeline_model_parallel_size=pp)
    places = coordinates(parallel, tp * cp * pp * dp)
    primaries = [place for place in places if place.primary]
    assert [place.dp for place in primaries] == list(range(dp))
    assert all(place.pp == pp - 1 and place.tp == place.cp == 0 for place in primaries)
