"""Options that inference servers of all backends have."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from dagrl.config.capability import Capability
from dagrl.config.coordinates import Coordinates
from dagrl.config.fp8_weights import Fp8Weights, Granularity
from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.library_fields import add_extra
from dagrl.config.schema.model import GroupSpec

ROUTED_EXPERTS = "enable_return_routed_experts"
"""The argument that makes servers return the experts of tokens."""


@dataclass(frozen=True, slots=True)
class ServerSlot:
    """Position of one slot of a group among its servers."""

    server: int
    place: int
    """Index among the server's slots. The worker of the first one runs the engine."""
    node: int
    """Index among the server's machines."""
    starts: bool
    """Whether it is the server's first slot on that machine, whose worker starts the processes of all its slots
    there."""


class ServerSpec(EngineSpec):
    """As many servers as fit on a group, which generate or compute log-probs of given tokens."""

    head: Literal["lm"] = "lm"
    """Servers have the language model's head."""
    server: dict[str, Any] = Field(default_factory=dict)
    """The server's own arguments, by their names."""
    extra: dict[Literal["server"], dict[str, Any]] = Field(default_factory=dict)
    """Further arguments of the server, which are not tested with dagrl: ``extra: {server: {...}}``."""
    quantization: Literal["fp8", "fp8_per_channel"] | None = None
    """Receive the linear layers' weights in fp8, quantised by the trainer's ranks, and multiply in fp8: ``fp8`` has a
    scale for each block of 128 x 128, ``fp8_per_channel`` one for each output channel. Needs ``weights_from``. The
    cache has a separate option, ``server.kv_cache_dtype``."""
    modules_to_not_convert: tuple[str, ...] = ()
    """With ``quantization``: modules that stay in bfloat16, as ``model.layers.0`` or ``down_proj``."""
    allow_untested: bool = False
    """Allow a version of the library that was not tested with dagrl. Compare its first steps with a tested one's."""

    _add_extra = model_validator(mode="after")(add_extra)

    capabilities: ClassVar = frozenset({Capability.GENERATE, Capability.REPLY, Capability.SCORE})
    transports: ClassVar = ("cuda_ipc", "broadcast", "object_store")
    updates_in_flight: ClassVar = True
    takes_adapters: ClassVar = True
    replicas_are_servers: ClassVar = True
    takes_images: ClassVar = True
    reports_routed_experts: ClassVar = True
    context_field: ClassVar[str]
    """The field of ``server`` for the longest prompt and response."""
    scored_tokens_kept_back: ClassVar[int] = 0
    """Tokens of that context that must stay free in rows for log-probs."""

    @property
    @abstractmethod
    def gpus_per_server(self) -> int:
        """GPUs or CPU slots of one server."""

    @property
    def stages(self) -> int:
        """Pipeline stages of a server, which receive new weights one after the other."""
        return 1

    def size(self, field: str) -> int:
        """One of the sizes in ``server``, whose default is 1."""
        return int(self.server.get(field, 1))

    def slots(self, group: GroupSpec) -> list[ServerSlot]:
        """The slots of a group in order, machine by machine; servers divide them."""
        size, per_node = self.gpus_per_server, group.slots_per_node
        assert group.ranks % size == 0, f"servers of {size} slots do not divide {group.ranks}"
        places = [divmod(rank, size) for rank in range(group.ranks)]
        return [ServerSlot(server, place, place // per_node, place % per_node == 0) for server, place in places]

    def nodes_per_server(self, group: GroupSpec) -> int:
        return -(-self.gpus_per_server // group.slots_per_node)

    def layout(self, group: GroupSpec) -> list[Coordinates]:
        """One replica for each server, which itself splits the model over its slots, stage by stage."""
        of_stage = self.gpus_per_server // self.stages
        places = ((slot, *divmod(slot.place, of_stage)) for slot in self.slots(group))
        return [Coordinates(tp, 0, slot.server, pp, primary=slot.place == 0) for slot, pp, tp in places]

    def layout_text(self, group: GroupSpec) -> str:
        """For example ``4 servers of 2 GPUs``."""
        size = self.gpus_per_server
        servers = f"{group.ranks // size} server{'s' if group.ranks > size else ''}"
        return servers + (f" of {size} GPUs" if size > 1 else "")

    @property
    def taken_fp8(self) -> Fp8Weights | None:
        granularity = self.fp8_granularity
        return None if granularity is None else Fp8Weights(granularity, self.modules_to_not_convert)

    @property
    def fp8_granularity(self) -> Granularity | None:
        if self.quantization is None:
            return None
        return "block" if self.quantization == "fp8" else "channel"
