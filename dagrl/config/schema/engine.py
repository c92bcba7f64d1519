"""Options of engines of all backends. A backend adds its options in `dagrl/backends/NAME/section.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dagrl.config.capability import Capability
from dagrl.config.coordinates import Coordinates
from dagrl.config.fp8_weights import Fp8Weights
from dagrl.config.schema.model import GroupSpec, ModelSpec
from dagrl.config.schema.section import Name, Section

Sleep = Literal["auto"] | bool
"""Whether an engine frees the memory of its devices while another engine of its group works."""
Head = Literal["lm", "value", "reward"]
Transport = Literal["cuda_ipc", "broadcast", "object_store"]


class WeightSyncSpec(Section):
    """How new weights reach an engine with ``weights_from``."""

    route: Literal["auto"] | Transport = "auto"
    """``cuda_ipc``: from GPU to the same GPU, where trainer and servers share a group. ``broadcast``: NCCL from the
    trainer to the servers of another group (gloo on CPUs). ``object_store``: through Ray's objects and the host's
    memory, for all other cases. ``auto``: the first that the groups allow; on CPUs the last."""
    bucket_mib: Annotated[int, Field(ge=1, le=2**16)] = 256
    """Weights that travel together, in MiB; up to two buckets wait on each side."""
    checksum: bool = False
    """Send all weights again and compare them with the servers'; the run ends if they differ."""
    pause: Literal["abort", "retract", "in_place"] = "abort"
    """Treatment of responses that are being generated. ``abort`` ends them as they are; ``retract`` computes their
    cache anew with the new weights; ``in_place`` goes on with the cache of the old ones."""


@dataclass(frozen=True, slots=True)
class SentAdapter:
    """The properties of low-rank adapters that a generator needs before the adapters arrive."""

    rank: int
    alpha: float


@dataclass(frozen=True, slots=True)
class RowPacking:
    """How an engine packs rows into micro-batches."""

    alignment: int = 1
    """Each row is padded to a multiple of this length."""
    whole_groups: bool = False
    """Whether the rows of a group go to one replica, which shares their prompt."""


class EngineSpec(Section):
    """A model with a layout on a group.

    A backend derives its section from this class, with ``backend: Literal["NAME"]``. Class variables and methods say
    what follows from the section alone; everything else is in the backend's `dagrl.backends.registry.Backend`.
    """

    backend: str
    """The backend, by the name of its folder."""
    group: Name | None = None
    """The group that it runs on."""
    weights_from: Name | None = None
    """The trained engine whose weights it takes before each rollout. Default: it keeps the weights it starts with."""
    weight_sync: WeightSyncSpec = WeightSyncSpec()
    """How new weights reach it."""
    frozen_copy_of: Name | None = None
    """Instead of a group: live on that engine's ranks, as its frozen start weights, swapped in when they are needed."""
    moving_average: Annotated[float, Field(gt=0, le=1)] | None = None
    """With `frozen_copy_of`: instead of the start weights, their moving average, which becomes (1 - rate) * average +
    rate * new weights after each step: a rate such as 0.05. In float32 in host memory, and in checkpoints."""
    model: ModelSpec | None = None
    """A model other than the pipeline's, for example for a critic, a reward model, a judge or a teacher."""
    head: Head = "lm"
    """Output layer: the language model's, a value for each token, or a score for each row."""
    environment: Path | None = None
    """A virtual environment whose Python runs the engine's workers: the NAME of one that ``make NAME`` has built beside
    the driver's (``vllm``), or a folder with ``bin/python``, written with a slash. Default: the driver's."""
    sleep: Sleep = "auto"
    """Free the GPUs' memory while another engine of the group works. ``auto``: on GPUs that it shares with another
    engine, unless it fits beside that one."""

    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    """Capabilities that ops can use."""
    transports: ClassVar[tuple[Transport, ...]] = ("object_store",)
    """Values of ``weight_sync.route`` by which it can receive weights."""
    updates_in_flight: ClassVar[bool] = False
    """Whether it can take new weights while responses are being generated."""
    replicas_are_servers: ClassVar[bool] = False
    """Whether each replica is a server with its own processes. The worker on the first rank of a server speaks for
    it; the first one on each machine starts the processes there."""
    takes_adapters: ClassVar[bool] = False
    """Whether it can load the model itself, and take low-rank adapters instead of weights."""
    holds_frozen_copies: ClassVar[bool] = False
    """Whether another engine can be its ``frozen_copy_of``."""
    reads_messages: ClassVar[bool] = False
    """Whether a reward head reads conversations with its own chat template, instead of the policy's tokens."""
    takes_images: ClassVar[bool] = False
    """Whether prompts can have images."""
    reports_routed_experts: ClassVar[bool] = False
    """Whether it can return the experts that tokens were routed to."""

    @property
    def generates(self) -> bool:
        """Whether it writes text."""
        return bool(self.capabilities & {Capability.GENERATE, Capability.REPLY})

    @property
    def adapter_dropout(self) -> float | None:
        """Dropout of low-rank adapters in an update, as a share of their inputs; None if updates change the whole
        model.
        """
        return None

    @property
    def sent_adapter(self) -> SentAdapter | None:
        """The adapters that it sends to generators in place of weights."""
        return None

    @property
    def taken_fp8(self) -> Fp8Weights | None:
        """The weights that it receives in fp8; None if it receives all of them in the trainer's format."""
        return None

    @property
    def replays_routes(self) -> bool:
        """Whether it routes tokens to the experts that the generator chose."""
        return False

    @property
    def packing(self) -> RowPacking:
        return RowPacking()

    def layout(self, group: GroupSpec) -> list[Coordinates]:
        """Coordinates of the ranks of `group`, in order. Default: one replica on each rank."""
        return [Coordinates(0, 0, rank, 0, primary=True) for rank in range(group.ranks)]

    def layout_text(self, group: GroupSpec) -> str:
        """A description of the layout for summaries."""
        return f"{group.ranks} replica{'s' if group.ranks > 1 else ''}"
