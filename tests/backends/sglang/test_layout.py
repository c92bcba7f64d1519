"""Which slots of a group a server takes."""

import pytest

from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.config.schema import GroupSpec


def engine(**server: object) -> SglangEngineSpec:
    return SglangEngineSpec(backend="sglang", group="rollout", server=server)


@pytest.mark.parametrize(
    ("server", "gpus"),
    [
        ({}, 1),
        ({"tp_size": 2}, 2),
        ({"tp_size": 2, "pp_size": 3}, 6),
        ({"tp_size": 2, "dp_size": 4}, 8),
        ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, 4),
        ({"tp_size": 4, "ep_size": 4, "moe_dp_size": 2}, 4),
    ],
)
def test_gpus_of_a_server(server, gpus):
    assert engine(**server).gpus_per_server == gpus


def test_servers_are_on_adjacent_slots_of_a_machine():
    slots = engine(tp_size=2).slots(GroupSpec(gpus_per_node=4))
    assert [(slot.server, slot.place) for slot in slots] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [slot.place == 0 for slot in slots] == [slot.starts for slot in slots] == [True, False, True, False]
    assert {slot.node for slot in slots} == {0}
    assert engine(tp_size=2).nodes_per_server(GroupSpec(gpus_per_node=4)) == 1


def test_a_server_across_machines_has_a_starter_on_each():
    group = GroupSpec(nodes=4, gpus_per_node=2)
    slots = engine(tp_size=4).slots(group)
    assert [slot.server for slot in slots] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [slot.node for slot in slots] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [rank for rank, slot in enumerate(slots) if slot.starts] == [0, 2, 4, 6]
    assert [rank for rank, slot in enumerate(slots) if slot.place == 0] == [0, 4]
    assert engine(tp_size=4).nodes_per_server(group) == 2


def test_a_server_on_each_cpu_slot():
    slots = engine().slots(GroupSpec(cpus_per_node=3))
    assert [slot.server for slot in slots] == [0, 1, 2] and all(slot.place == 0 for slot in slots)
