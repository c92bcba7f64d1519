"""Ray, the network, and this machine's place among others."""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.doctor.findings import Line, hint, missing, ok
from dagrl.doctor.probe import Edges
from dagrl.launcher.errors import LaunchError
from dagrl.launcher.node_rank import node_rank_from
from dagrl.workers.cluster.addresses import OWN, is_of_a_client


def network(edges: Edges, *, on_gpus: bool) -> Iterator[Line]:
    """Lines on how this machine reaches others."""
    interfaces = {name: addresses for name, addresses in edges.interfaces().items() if name != "lo"}
    named = ", ".join(f"{name} {' '.join(addresses)}".strip() for name, addresses in interfaces.items() if addresses)
    yield ok("interfaces", named) if named else hint("interfaces", "none but the loopback: one machine only")
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        chosen = edges.variables.get(variable, "").lstrip("=")
        if chosen.startswith("^"):
            continue  # what is not to be used need not be there
        unknown = [name for name in chosen.split(",") if name and not any(each.startswith(name) for each in interfaces)]
        if unknown and "lo" not in unknown:
            yield missing(variable, f"names {', '.join(unknown)}, which this machine has not")
    ports = edges.infiniband()
    if ports:
        down = [port for port in ports if "ACTIVE" not in port]
        yield hint("InfiniBand", f"not active: {', '.join(down)}") if down else ok("InfiniBand", ", ".join(ports))
    elif on_gpus:
        yield hint("InfiniBand", "none; NCCL goes over TCP between machines, which is slow for large models")
    yield from _ray(edges)
    yield from _place(edges)


def _ray(edges: Edges) -> list[Line]:
    lines = []
    address, running = edges.variables.get("RAY_ADDRESS"), edges.running_ray()
    if address == OWN:
        lines.append(ok("Ray", f"RAY_ADDRESS is {OWN}: a run starts its own and ends it"))
    elif address and is_of_a_client(address):
        lines.append(missing("Ray", f"RAY_ADDRESS is {address}, where Ray's client is served; give its HOST:PORT"))
    elif address and (silence := edges.silence_at(address)):
        lines.append(missing("Ray", f"RAY_ADDRESS is {address}, where nobody answers ({silence}); unset it"))
    elif address:
        lines.append(hint("Ray", f"RAY_ADDRESS is {address}: `dagrl run` joins that cluster"))
    elif running:
        lines.append(hint("Ray", f"one runs on this machine at {running}: `dagrl run` joins it"))
    else:
        lines.append(ok("Ray", "none runs here; a run starts its own and ends it"))
    return lines


def _place(edges: Edges) -> list[Line]:
    name = "PET_* variables"
    try:
        place = node_rank_from(edges.variables)
    except LaunchError as error:
        return [missing(name, str(error))]
    if place is None:
        return [ok(name, "none for several machines: `dagrl launch` is `dagrl run`")]
    where = f"rank {place.rank} of {place.nodes} machines, rank 0 at {place.endpoint}"
    if not edges.resolves(place.master):
        return [missing(name, f"{where}; the name {place.master} leads to no address")]
    if place.is_leader and not edges.can_listen(place.port):
        return [missing(name, f"{where}; the port is taken: choose another PET_MASTER_PORT for all machines")]
    return [ok(name, where)]
