"""``backend: sglang``: servers that generate."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from dagrl.backends.serving.section import ServerSpec
from dagrl.backends.sglang.fields import ServerFields
from dagrl.backends.sglang.layout import FP8_PAGE, gpus_per_server, server_slots
from dagrl.config.capability import Capability
from dagrl.config.coordinates import Coordinates
from dagrl.config.schema.library_fields import GivenFields, add_extra
from dagrl.config.schema.model import GroupSpec


class SglangEngineSpec(ServerSpec):
    """SGLang servers that generate, as many as fit on the group."""

    backend: Literal["sglang"]
    """SGLang: its schedulers run in processes of their own, without an HTTP server."""
    head: Literal["lm"] = "lm"
    """Servers have the language model's head."""
    server: GivenFields[ServerFields] = Field(default_factory=dict)
    """Fields of SGLang's ServerArgs. A server takes tp_size x pp_size GPUs, times dp_size without DP attention."""
    extra: dict[Literal["server"], dict[str, Any]] = Field(default_factory=dict)
    """Further fields of ServerArgs, which are not tested with dagrl: ``extra: {server: {...}}``."""

    _add_extra = model_validator(mode="after")(add_extra)

    capabilities: ClassVar = frozenset({Capability.GENERATE, Capability.REPLY})
    transports: ClassVar = ("cuda_ipc", "broadcast", "object_store")
    updates_in_flight: ClassVar = True
    takes_adapters: ClassVar = True
    replicas_are_servers: ClassVar = True
    takes_images: ClassVar = True
    reports_routed_experts: ClassVar = True

    @property
    def page_size(self) -> int:
        """Tokens of a page of the cache. Models that cannot have larger ones are not served in fp8."""
        in_fp8 = self.taken_fp8 is not None and str(self.server.get("kv_cache_dtype")).startswith("fp8")
        return int(self.server.get("page_size", FP8_PAGE if in_fp8 else 1))

    def layout(self, group: GroupSpec) -> list[Coordinates]:
        """One replica for each server; SGLang itself splits the model over its slots."""
        slots = server_slots(self.server, group)
        return [Coordinates(slot.place, 0, slot.server, 0, primary=slot.leads) for slot in slots]

    def layout_text(self, group: GroupSpec) -> str:
        """For example ``4 servers of 2 GPUs``."""
        each = gpus_per_server(self.server)
        servers = f"{group.ranks // each} server{'s' if group.ranks > each else ''}"
        return servers + (f" of {each} {'slots' if group.is_cpu else 'GPUs'}" if each > 1 else "")

    def update_waves(self, group: GroupSpec) -> tuple[tuple[int, ...], ...]:
        """One wave for each pipeline stage: SGLang passes an update on to a stage after the one before has taken it."""
        each, stages = gpus_per_server(self.server), self.server.get("pp_size", 1)
        ranks_of_stage = each // stages
        return tuple(
            tuple(rank for rank in range(group.ranks) if rank % each // ranks_of_stage == stage)
            for stage in range(stages)
        )
