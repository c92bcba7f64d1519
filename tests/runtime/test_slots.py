"""The order of slots on several machines."""

from __future__ import annotations

import pytest

from dagrl.runtime.errors import RunError
from dagrl.runtime.slots import machine_by_machine
from dagrl.spec.schema import GroupSpec

GROUP = GroupSpec(nodes=2, gpus_per_node=2)


@pytest.mark.parametrize(
    ("machines", "order"),
    [
        ({0: "a", 1: "a", 2: "b", 3: "b"}, [0, 1, 2, 3]),
        ({0: "b", 1: "a", 2: "b", 3: "a"}, [1, 3, 0, 2]),
        ({0: "a", 1: "a", 2: "a", 3: "a"}, [0, 1, 2, 3]),
    ],
)
def test_slots_of_a_machine_stay_together(machines, order):
    assert machine_by_machine("rollout", GROUP, machines) == order


def test_parts_of_machines_are_refused():
    machines = {0: "a", 1: "a", 2: "a", 3: "b"}
    with pytest.raises(RunError, match=r"group rollout is 2 machines with 2 slots each, and .* as 3 \+ 1"):
        machine_by_machine("rollout", GROUP, machines)
