"""The section of ``backend: vllm``."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from dagrl.backends.serving.section import ServerSpec
from dagrl.backends.serving.slots import slots_of_servers
from dagrl.backends.vllm.fields import VllmFields
from dagrl.config.capability import Capability
from dagrl.config.coordinates import Coordinates
from dagrl.config.schema.library_fields import GivenFields, add_extra
from dagrl.config.schema.model import GroupSpec

VLLM_VERSION = "0.26.0"
"""Version that this package supports: its requests, processes and weights."""

CPU_CACHE_GIB = 1
"""GiB of a server's cache on a CPU slot."""

ROUTED_EXPERTS = "enable_return_routed_experts"
"""Engine argument that has servers return the experts that tokens were routed to."""


class VllmEngineSpec(ServerSpec):
    """vLLM servers that generate, as many as fit on the group."""

    backend: Literal["vllm"]
    """vLLM: its engine runs in the worker, without an HTTP server. It usually needs an `environment`."""
    head: Literal["lm"] = "lm"
    """Servers have the language model's head."""
    server: GivenFields[VllmFields] = Field(default_factory=dict)
    """Fields of vLLM's engine arguments. A server takes tensor_parallel_size x data_parallel_size GPUs."""
    extra: dict[Literal["server"], dict[str, Any]] = Field(default_factory=dict)
    """Further engine arguments, which are not tested with dagrl: ``extra: {server: {...}}``."""

    _add_extra = model_validator(mode="after")(add_extra)

    capabilities: ClassVar = frozenset({Capability.GENERATE, Capability.REPLY})
    transports: ClassVar = ("cuda_ipc", "broadcast", "object_store")
    updates_in_flight: ClassVar = True
    takes_adapters: ClassVar = True
    replicas_are_servers: ClassVar = True
    takes_images: ClassVar = True
    reports_routed_experts: ClassVar = True

    @property
    def tensor_size(self) -> int:
        """GPUs that share each layer."""
        return int(self.server.get("tensor_parallel_size", 1))

    @property
    def attention_copies(self) -> int:
        """Copies of attention within a server, each with its own requests and cache; they share the experts."""
        return int(self.server.get("data_parallel_size", 1))

    @property
    def gpus_per_server(self) -> int:
        """GPUs that one server takes, or CPU slots."""
        return self.tensor_size * self.attention_copies

    def layout(self, group: GroupSpec) -> list[Coordinates]:
        """One replica for each server; vLLM itself splits the model over its slots."""
        slots = slots_of_servers(self.gpus_per_server, group)
        return [Coordinates(slot.place, 0, slot.server, 0, primary=slot.leads) for slot in slots]

    def layout_text(self, group: GroupSpec) -> str:
        """For example ``4 servers of 2 GPUs``."""
        each = self.gpus_per_server
        servers = f"{group.ranks // each} server{'s' if group.ranks > each else ''}"
        return servers + (f" of {each} GPUs" if each > 1 else "")


def utilization_of(spec: VllmEngineSpec, *, sleeps: bool) -> float:
    """The share of a GPU that a server fills: the file's, less than vLLM's for one that sleeps, or vLLM's."""
    # Colocated engines keep some memory even asleep.
    return float(spec.server.get("gpu_memory_utilization", 0.8 if sleeps else 0.92))
