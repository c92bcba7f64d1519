"""Assigns the slots of a group to SGLang servers; arithmetic only, for validation, planning and workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dagrl.backends.serving.slots import ServerSlot, slots_of_servers
from dagrl.config.schema.model import GroupSpec

TAKEN_OUT_OF_TP = ("ep_size", "attn_cp_size", "moe_dp_size", "dcp_size")
"""Fields of ServerArgs that subdivide ``tp_size``; each divides it."""

PARALLEL_SIZES = ("tp_size", "pp_size", "dp_size", *TAKEN_OUT_OF_TP)
"""Fields of ServerArgs that distribute a server over its GPUs."""

CPU_CACHE_TOKENS = 16384
"""Default ``max_total_tokens`` of a server on a CPU slot."""

KEPT_BACK = 8
"""Tokens at the end of a context and of a cache that SGLang does not use: it rejects a request that begins within six
of the end, as a resumed response may, and ends those that come within two."""

FUSED = "fused"
"""The `sampling_backend` that is dagrl's. ServerArgs does not have it, and would replace it on a CPU."""

ROUTED_EXPERTS = "enable_return_routed_experts"
"""Field of ServerArgs that has servers return the experts that tokens were routed to."""

SLEEPER_FRACTION = 0.8
"""Default ``mem_fraction_static`` of a server that sleeps: SGLang would use what is free at its start, and colocated
engines keep some of it even while they sleep."""

LARGEST_GRAPH = 512
"""Default number of running requests up to which decoding graphs are captured; beyond SGLang's own limit it runs at
half its speed."""

FP8_PAGE = 64
"""Default ``page_size`` of a cache in fp8: FlashAttention 3 reads single tokens of it no faster than those of one in
bfloat16, and such pages in 0.8 of the time."""


def kept_of_cache(page_size: int) -> int:
    """Tokens of a cache that no sample can use: SGLang rounds a prompt up to whole pages, and keeps one free."""
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
    return slots_of_servers(gpus_per_server(server), group)


def _size(server: Mapping[str, Any], field: str) -> int:
    return int(server.get(field, 1))
