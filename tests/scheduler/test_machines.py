"""Groups on machines."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.config.schema import GroupSpec
from dagrl.scheduler.machines import Machine, MisfitError, assign_machines


def gpus(*counts: int) -> list[Machine]:
    return [Machine(f"node{index}", gpus=count, cpus=4) for index, count in enumerate(counts)]


@pytest.mark.parametrize(
    ("groups", "machines", "found"),
    [
        ({"train": (2, 8), "rollout": (1, 8)}, gpus(8, 8, 8), {"train": (0, 1), "rollout": (2,)}),
        ({"a": (1, 4), "b": (1, 4), "c": (1, 8)}, gpus(8, 8), {"a": (1,), "b": (1,), "c": (0,)}),
        ({"a": (1, 4), "b": (2, 4), "c": (1, 4)}, gpus(8, 8), {"a": (0,), "b": (0, 1), "c": (1,)}),
        ({"small": (1, 2)}, gpus(8, 2), {"small": (1,)}),
        # Only 3 + 3 and 2 + 2 + 2 will do.
        ({"a": (1, 3), "b": (1, 3), "c": (1, 2), "d": (1, 2), "e": (1, 2)}, gpus(6, 6), None),
    ],
)
def test_groups_get_whole_pieces_of_machines(groups, machines, found):
    specs = {name: GroupSpec(nodes=nodes, gpus_per_node=each) for name, (nodes, each) in groups.items()}
    placed = assign_machines(specs, machines)
    if found is None:
        assert holds(specs, machines, placed)
    else:
        assert placed == found


def test_cpu_slots_and_gpus_do_not_compete():
    groups = {"train": GroupSpec(nodes=2, gpus_per_node=8), "rollout": GroupSpec(cpus_per_node=4)}
    assert assign_machines(groups, gpus(8, 8)) == {"train": (0, 1), "rollout": (0,)}


@pytest.mark.parametrize(
    ("groups", "machines", "message"),
    [
        (
            {"train": GroupSpec(nodes=2, gpus_per_node=4), "rollout": GroupSpec(gpus_per_node=8)},
            gpus(8, 8),
            "the groups ask for train 4 GPUs on each of 2 machines, rollout 8 GPUs on one machine; there are node0 "
            "with 8 GPUs, node1 with 8 GPUs",
        ),
        (
            {"train": GroupSpec(nodes=2, gpus_per_node=4)},
            gpus(8),
            "the group asks for train 4 GPUs on each of 2 machines; there is node0 with 8 GPUs",
        ),
        (
            {"train": GroupSpec(nodes=1, cpus_per_node=5)},
            gpus(*[8] * 20),
            "the group asks for train 5 CPU slots on one machine; there are 20 machines with 4 CPU slots",
        ),
        (
            {"train": GroupSpec(gpus_per_node=1)},
            [],
            "the group asks for train 1 GPU on one machine; there is no machine",
        ),
    ],
)
def test_missing_resources_are_reported_beside_the_available_ones(groups, machines, message):
    with pytest.raises(MisfitError) as caught:
        assign_machines(groups, machines)
    assert str(caught.value) == message


@pytest.mark.parametrize(("there", "got"), [(2, 1), (3, 2), (9, 4)])
def test_a_group_with_min_nodes_gets_as_many_machines_as_there_are(there, got):
    groups = {"train": GroupSpec(gpus_per_node=8), "rollout": GroupSpec(nodes=4, min_nodes=1, gpus_per_node=8)}
    placed = assign_machines(groups, gpus(*[8] * there))
    assert (len(placed["train"]), len(placed["rollout"])) == (1, got)
    with pytest.raises(MisfitError, match=r"rollout 8 GPUs on one machine; there is node0"):
        assign_machines(groups, gpus(8))


GROUPS = st.lists(
    st.builds(
        GroupSpec,
        nodes=st.integers(1, 3),
        min_nodes=st.none() | st.integers(1, 3),
        gpus_per_node=st.integers(1, 5),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(GROUPS, st.lists(st.integers(0, 8), min_size=1, max_size=4))
def test_a_way_is_found_wherever_there_is_one(specs, counts):
    groups, machines = {f"g{index}": spec for index, spec in enumerate(specs)}, gpus(*counts)
    least = [min(spec.min_nodes or spec.nodes, spec.nodes) for spec in specs]
    ways = product(*(combinations(range(len(machines)), nodes) for nodes in least))
    possible = any(holds(groups, machines, dict(zip(groups, way, strict=True))) for way in ways)
    try:
        assert holds(groups, machines, assign_machines(groups, machines))
    except MisfitError:
        assert not possible
    else:
        assert possible


def holds(groups: dict[str, GroupSpec], machines: list[Machine], placed: dict[str, tuple[int, ...]]) -> bool:
    """Whether every group has so many different machines, and none holds more than it has."""
    used = [0] * len(machines)
    for name, spec in groups.items():
        assert min(spec.min_nodes or spec.nodes, spec.nodes) <= len(set(placed[name])) <= spec.nodes
        for index in placed[name]:
            used[index] += spec.gpus_per_node
    return all(count <= machine.gpus for count, machine in zip(used, machines, strict=True))


def test_four_hundred_machines_take_no_time():
    groups = {f"g{index}": GroupSpec(nodes=100, gpus_per_node=4) for index in range(8)}
    placed = assign_machines(groups, gpus(*[8] * 400))
    assert holds(groups, gpus(*[8] * 400), placed)
    with pytest.raises(MisfitError):
        assign_machines(groups | {"more": GroupSpec(gpus_per_node=1)}, gpus(*[8] * 400))
