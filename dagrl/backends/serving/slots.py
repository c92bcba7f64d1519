"""Assigns the slots of a group to servers, and holds those without work. Arithmetic only until an engine is built."""

from __future__ import annotations

from dataclasses import dataclass

from dagrl.config.schema.model import GroupSpec


@dataclass(frozen=True, slots=True)
class ServerSlot:
    """Position of one slot of a group among its servers."""

    server: int
    """Number of its server."""
    place: int
    """Index among the server's slots."""
    node: int
    """Index among the server's machines."""
    starts: bool
    """Whether it is the server's first slot on that machine, whose worker starts the processes of all of them."""

    @property
    def leads(self) -> bool:
        """Whether its worker runs the engine."""
        return self.place == 0


def slots_of_servers(each: int, group: GroupSpec) -> list[ServerSlot]:
    """The slots of a group in order, machine by machine; servers of `each` slots are known to divide them."""
    per_node = group.gpus_per_node or group.cpus_per_node
    assert group.ranks % each == 0, f"servers of {each} slots do not divide {group.ranks}"
    slots = []
    for rank in range(group.ranks):
        number, place = divmod(rank, each)
        slots.append(ServerSlot(number, place, place // per_node, place % per_node == 0))
    return slots
