"""How many GPUs a SGLang server takes, and which slots of its group: plain arithmetic for checks, plan and workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dagrl.config.schema.model import GroupSpec

TAKEN_OUT_OF_TP = ("ep_size", "attn_cp_size", "moe_dp_size", "dcp_size")
"""Fields of ServerArgs that share out what a server's ``tp_size`` GPUs do; each divides it."""

PARALLEL_SIZES = ("tp_size", "pp_size", "dp_size", *TAKEN_OUT_OF_TP)
"""Fields of ServerArgs that share a server out over its GPUs."""

CPU_CACHE_TOKENS = 16384
"""Tokens that the cache of a server on a CPU slot holds, unless ``max_total_tokens`` says otherwise."""

KEPT_BACK = 8
"""Tokens at the end of a context, and of a cache, that SGLang gives no request: it takes none that begins within six of
the end, as a response does that goes on behind its last tokens but one, and ends those that come within two."""

ROUTED_EXPERTS = "enable_return_routed_experts"
"""Field of ServerArgs that has servers return the experts that tokens were routed to."""

SLEEPER_FRACTION = 0.8
"""``mem_fraction_static`` of a server that sleeps, unless the file says otherwise: SGLang would take what is free when
it starts, and neighbours keep some of it even while they sleep."""

LARGEST_GRAPH = 512
"""Running requests up to which decoding is captured, unless the file says otherwise; beyond SGLang's own bound it falls
to half its speed."""


@dataclass(frozen=True, slots=True)
class ServerSlot:
    """Place of one slot of a group among the servers on it."""

    server: int
    """Which server it belongs to."""
    place: int
    """Which of the server's slots it is."""
    node: int
    """Which of the server's machines it is on."""
    starts: bool
    """Whether it is the first of the server's slots on that machine: its worker starts the processes of all of them."""

    @property
    def leads(self) -> bool:
        """Whether its worker speaks for the server."""
        return self.place == 0


def kept_of_cache(page_size: int) -> int:
    """Tokens of a cache that no sample can have: SGLang rounds a prompt up to whole pages, and keeps one free."""
    return max(KEPT_BACK, 2 * page_size)


def gpus_per_server(server: Mapping[str, Any]) -> int:
    """GPUs that one server takes, or CPU slots. The sizes are checked to be whole numbers of 1 or more."""
    copies = 1 if server.get("enable_dp_attention") else _size(server, "dp_size")
    return _size(server, "tp_size") * _size(server, "pp_size") * copies


def nodes_per_server(server: Mapping[str, Any], group: GroupSpec) -> int:
    """Machines that one server spans."""
    return -(-gpus_per_server(server) // (group.gpus_per_node or group.cpus_per_node))


def server_slots(server: Mapping[str, Any], group: GroupSpec) -> list[ServerSlot]:
    """The slots of a group in order, machine by machine; servers are known to divide them."""
    each, per_node = gpus_per_server(server), group.gpus_per_node or group.cpus_per_node
    assert group.ranks % each == 0, f"servers of {each} slots do not divide {group.ranks}"
    slots = []
    for rank in range(group.ranks):
        number, place = divmod(rank, each)
        slots.append(ServerSlot(number, place, place // per_node, place % per_node == 0))
    return slots


def _size(server: Mapping[str, Any], field: str) -> int:
    return int(server.get(field, 1))
