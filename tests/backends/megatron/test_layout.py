"""Ranks and their places in a layout."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import pytest

from dagrl.backends.megatron.section import ParallelSpec, coordinates
from dagrl.config.coordinates import Coordinates


def layout(tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1) -> ParallelSpec:
    return ParallelSpec(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )


def test_tensor_parallel_ranks_are_neighbours_then_context_then_data_then_pipeline():
    places = [(place.tp, place.cp, place.dp, place.pp) for place in coordinates(layout(tp=2, cp=2, pp=2), 16)]
    assert places[:5] == [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0), (0, 0, 1, 0)]
    assert places[8] == (0, 0, 0, 1)
    assert len(set(places)) == 16


def test_experts_are_laid_out_over_the_ranks_of_each_stage():
    places = [(place.etp, place.ep, place.expert_dp, place.pp) for place in coordinates(layout(2, 2, 2, 2, 2), 16)]
    assert places[:5] == [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0), (0, 0, 1, 0)]
    assert places[8] == (0, 0, 0, 1)
    assert len(set(places)) == 16


@pytest.mark.parametrize(("tp", "cp", "pp", "dp"), [(1, 1, 1, 4), (2, 1, 1, 2), (2, 2, 2, 3), (1, 4, 2, 1)])
def test_one_rank_of_each_replica_is_its_output_rank(tp, cp, pp, dp):
    places = coordinates(layout(tp, cp, pp), tp * cp * pp * dp)
    primaries = [place for place in places if place.primary]
    assert [place.dp for place in primaries] == list(range(dp))
    assert all(place.pp == pp - 1 and place.tp == place.cp == 0 for place in primaries)


# -- against Megatron's own account of its process groups

DENSE_GROUPS = ("tp", "cp", "dp", "pp", "tp-cp", "tp-pp", "dp-cp", "tp-dp-cp")
EXPERT_GROUPS = ("tp", "ep", "dp", "pp", "tp-ep", "tp-ep-pp")
_EXPERT_NAMES = {"tp": "etp", "dp": "expert_dp"}
_SIZES = (1, 2, 3, 4, 8)


def _groups(places: list[Coordinates], varying: set[str], axes: set[str]) -> set[tuple[int, ...]]:
    """Ranks that agree on all axes but the varying ones."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        groups.setdefault(tuple(getattr(place, axis) for axis in sorted(axes - varying)), []).append(rank)
    return {tuple(group) for group in groups.values()}


@pytest.fixture
def generator():
    """Megatron's own maker of groups, in the order of dagrl's engine."""
    pytest.importorskip("megatron.core")
    from megatron.core.parallel_state import RankGenerator

    from dagrl.backends.megatron.engine.distributed import RANK_ORDER

    return partial(RankGenerator, order=RANK_ORDER)


def test_groups_are_those_of_megatron_on_every_layout(generator):
    layouts = [sizes for sizes in product(_SIZES, repeat=4) if math.prod(sizes) in (1, 8, 12, 24, 64)]
    assert len(layouts) > 100
    for tp, cp, dp, pp in layouts:
        places = coordinates(layout(tp, cp, pp), tp * cp * dp * pp)
        # As `initialize_model_parallel` makes the groups of all but experts.
        dense = generator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp)
        for token in DENSE_GROUPS:
            theirs = {tuple(sorted(group)) for group in dense.get_ranks(token)}
            assert _groups(places, set(token.split("-")), {"tp", "cp", "dp", "pp"}) == theirs, (tp, cp, dp, pp, token)


def test_expert_groups_are_those_of_megatron_whatever_the_other_sizes(generator):
    # Tensor, context and data parallel sizes of stages of 1 to 16 ranks; experts may cut across all of them.
    stages = [(1, 1, 1), (2, 1, 2), (1, 4, 1), (2, 3, 2), (4, 2, 2)]
    checked = 0
    for (tp, cp, dp), pp, ep, etp in product(stages, (1, 2, 4), _SIZES, (1, 2, 4)):
        copies, rest = divmod(tp * cp * dp, ep * etp)
        if rest:
            continue
        places = coordinates(layout(tp, cp, pp, ep, etp), tp * cp * dp * pp)
        expert = generator(tp=etp, ep=ep, dp=copies, pp=pp, cp=1)
        for token in EXPERT_GROUPS:
            theirs = {tuple(sorted(group)) for group in expert.get_ranks(token)}
            mine = {_EXPERT_NAMES.get(axis, axis) for axis in token.split("-")}
            assert _groups(places, mine, {"etp", "ep", "expert_dp", "pp"}) == theirs, (tp, cp, dp, pp, ep, etp, token)
        checked += 1
    assert checked > 80
