"""The machines of a Ray cluster."""

from __future__ import annotations

from types import ModuleType

from dagrl.scheduler.machines import Machine


def machines_of(ray: ModuleType, *, free: bool = False) -> list[Machine]:
    """The machines that are alive, the driver's first, then by address, with all their slots or those that are free."""
    from ray._private.state import available_resources_per_node

    left = available_resources_per_node() if free else {}
    own = ray.get_runtime_context().get_node_id()
    nodes = sorted(
        (node for node in ray.nodes() if node["Alive"]),
        key=lambda node: (node["NodeID"] != own, _address_key(node["NodeManagerAddress"]), node["NodeID"]),
    )
    machines = []
    for node in nodes:
        has = left.get(node["NodeID"], {}) if free else node["Resources"]
        name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        machines.append(Machine(name, int(has.get("GPU", 0)), int(has.get("CPU", 0)), node["NodeID"]))
    return machines


def _address_key(address: str) -> tuple[int, ...] | tuple[()]:
    """Numbers of an IPv4 address, so that .10 comes after .9; empty for others."""
    parts = address.split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()
