"""Assigns machines to groups: each group needs a number of slots on each of a number of machines. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from dagrl.config.errors import counted
from dagrl.config.schema import GroupSpec

_MOST_NAMED = 16
"""Most machines that a message lists one by one."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the cluster and its slots."""

    name: str
    """Host name and address, for messages."""
    gpus: int
    cpus: int
    id: str = ""
    """Ray node id."""

    def slots(self, cpu: bool) -> int:
        return self.cpus if cpu else self.gpus


class MisfitError(ValueError):
    """The groups do not fit on the machines."""


def assign_machines(groups: Mapping[str, GroupSpec], machines: Sequence[Machine]) -> dict[str, tuple[int, ...]]:
    """The machines of each group, by index, ascending. MisfitError if there is no assignment.

    Partly used machines are filled first, so that whole ones stay free. Elastic groups get fewer machines if there are
    not enough, the largest ones first.
    """
    while True:
        try:
            return _assign(groups, machines)
        except MisfitError:
            elastic = [name for name, group in groups.items() if group.is_elastic]
            if not elastic:
                raise
            largest = max(elastic, key=lambda name: groups[name].nodes)
            fewer = groups[largest].model_copy(update={"nodes": groups[largest].nodes - 1})
            groups = {**groups, largest: fewer}


def _assign(groups: Mapping[str, GroupSpec], machines: Sequence[Machine]) -> dict[str, tuple[int, ...]]:
    assigned: dict[str, tuple[int, ...]] = {}
    for cpu in (False, True):
        alike = {name: group for name, group in groups.items() if group.is_cpu == cpu}
        # Large groups first: small ones fit in between.
        order = sorted(alike.items(), key=lambda item: (-item[1].slots_per_node, -item[1].nodes))
        placed = _place(order, [machine.slots(cpu) for machine in machines])
        if placed is None:
            raise MisfitError(_misfit(alike, machines, cpu))
        assigned |= placed
    return {name: assigned[name] for name in groups}


def _place(order: Sequence[tuple[str, GroupSpec]], free: list[int]) -> dict[str, tuple[int, ...]] | None:
    if not order:
        return {}
    if sum(group.ranks for _, group in order) > sum(free):
        return None
    (name, group), *others = order
    for chosen in _choices(free, group.slots_per_node, group.nodes):
        left = [room - group.slots_per_node * (index in chosen) for index, room in enumerate(free)]
        placed = _place(others, left)
        if placed is not None:
            return {name: tuple(sorted(chosen)), **placed}
    return None


def _choices(free: Sequence[int], slots: int, nodes: int) -> Iterator[frozenset[int]]:
    """Sets of `nodes` machines with `slots` free slots each, fullest first. Equivalent sets are listed once."""
    fitting = sorted(
        (index for index, room in enumerate(free) if room >= slots), key=lambda index: (free[index], index)
    )
    alike = [list(members) for _, members in groupby(fitting, key=free.__getitem__)]

    def take(levels: Sequence[list[int]], wanted: int) -> Iterator[frozenset[int]]:
        if wanted == 0:
            yield frozenset()
        elif levels:
            for count in range(min(wanted, len(levels[0])), -1, -1):
                for others in take(levels[1:], wanted - count):
                    yield others.union(levels[0][:count])

    return take(alike, nodes)


def _misfit(groups: Mapping[str, GroupSpec], machines: Sequence[Machine], cpu: bool) -> str:
    noun = "CPU slot" if cpu else "GPU"
    wishes = []
    for name, group in groups.items():
        where = "on one machine" if group.nodes == 1 else f"on each of {group.nodes} machines"
        wishes.append(f"{name} {counted(group.slots_per_node, noun)} {where}")
    asks = "group asks" if len(groups) == 1 else "groups ask"
    if len(machines) <= _MOST_NAMED:
        there = [f"{machine.name} with {counted(machine.slots(cpu), noun)}" for machine in machines]
    else:
        sizes = Counter(machine.slots(cpu) for machine in machines)
        there = [f"{count} machines with {counted(size, noun)}" for size, count in sorted(sizes.items(), reverse=True)]
    inventory = ", ".join(there) or "no machine"
    return f"the {asks} for {', '.join(wishes)}; there {'are' if len(machines) > 1 else 'is'} {inventory}"
