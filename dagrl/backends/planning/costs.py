"""Estimates of the seconds of an engine's work and moves, for `dagrl plan`, which a backend may override.

They describe a later step of a run, in which nothing is compiled or connected anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from dagrl.backends.planning.decoding import Lengths, Server
from dagrl.backends.planning.device_rates import DeviceRates
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.config.residency import Residency
from dagrl.config.schema import EngineSpec

WEIGHT_BYTES = 2
_SERVER_SLEEP_S = 0.05
_SERVERS_SLEEP_S = 0.1
"""Servers free their memory: 0.02 to 0.06 s on one GPU; on two, the slower, 0.05 to 0.19 s."""
_SERVER_WAKE_S = 0.025
"""Servers allocate it again."""
_RETURN_BYTES_PER_S = 135e9
"""Allocation of weights that others have just left: 0.03 to 0.08 s for 3.4 GB, 0.12 to 0.14 s for 16.4."""
_SWAP_SHARE = 0.56
"""Share of the rates between host and GPU, measured tensor by tensor; since then both directions overlap, which is not
measured."""
_DISK_BYTES_PER_S = 1e9
"""A machine's share of the storage of checkpoints; an order of magnitude."""
_SAVE_S = 1.0


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """Rows that are processed together by a model, divided among its replicas."""

    rows: float
    lengths: Lengths
    budget: int
    """Most tokens of a micro-batch."""
    per_prompt: int = 1
    """Rows with the same prompt."""
    sums_over_tokens: bool = False
    """Whether they are trained on with a loss that is a sum over tokens."""


class EngineCosts:
    """Seconds of one engine. The defaults describe a backend whose ranks hold whole models."""

    def __init__(self, engine: PlannedEngine[EngineSpec]) -> None:
        self.engine = engine
        self.device: DeviceRates = engine.device

    # -- bytes

    @cached_property
    def parameters(self) -> float:
        return self.engine.shape.parameters

    @property
    def weight_bytes(self) -> float:
        return self.parameters * WEIGHT_BYTES

    @property
    def state_bytes(self) -> float:
        """Optimizer states on one GPU."""
        return 0.0

    @property
    def state_bytes_on_host(self) -> float:
        """Optimizer states of one rank that stay on the host."""
        return 0.0

    @property
    def backed_up_bytes(self) -> float:
        """Weights of one GPU that wait on the host in a sleep, because no other engine sends them again."""
        return 0.0 if self.engine.spec.weights_from else self.weight_bytes

    # -- work

    @property
    def multiplies_in_fp8(self) -> bool:
        """Whether the products of linear layers are in fp8."""
        return self.server.fp8 is not None

    @cached_property
    def server(self) -> Server:
        return Server(self.engine.shape, self.device, per_node=self.engine.per_node)

    def forward(self, batch: PlannedBatch) -> float:
        """Return the seconds of a pass without gradients: its matrix products."""
        tokens = batch.rows * batch.lengths.row / self.engine.executor.replicas
        return 2 * self.parameters * tokens / self.device.matmul

    def update(self, batch: PlannedBatch) -> float:
        """Return the seconds of a forward and a backward pass, and of the optimizer's step."""
        return 3 * self.forward(batch)

    @property
    def passes_of_update(self) -> int:
        """Operations of a forward and a backward pass, in forward passes."""
        return 3

    @property
    def load_s(self) -> float:
        """Seconds to load and offload weights, once for each task."""
        return 0.0

    @property
    def sent_parameters(self) -> float:
        return self.parameters

    @property
    def load_to_send_s(self) -> float:
        """Seconds of `load_s` in a weight sync."""
        return self.load_s

    @property
    def swap_s(self) -> float:
        """Seconds to swap the weights with start weights on the host, and back."""
        return 2 * self.weight_bytes * (1 / self.device.to_host + 1 / self.device.from_host) / _SWAP_SHARE

    def reconnect_s(self, *, updates: bool) -> float:
        """Return the additional seconds of the first pass after a wake, with `updates` including the first update's."""
        return 0.0

    # -- weight syncs, as the sender

    @property
    def gathered_share(self) -> float:
        """Share of the weights that a rank gets from its neighbours."""
        return 0.0

    @property
    def owned_share(self) -> float:
        """Largest share of the weights that one rank sends if all owners send at once."""
        return 1.0

    @property
    def gather_rate(self) -> float:
        """Bytes per second at which a rank gathers weights from others."""
        return self.device.peers

    @property
    def reconnect_to_send_s(self) -> float:
        """Seconds that the first sync after a wake takes longer."""
        return 0.0

    # -- moves

    def sleep(self, residency: Residency) -> float:
        """Return the seconds in which the engine frees memory, down to `residency`."""
        return server_sleep_seconds(self.backed_up_bytes, self.device, ranks=self.engine.group.ranks)

    def wake(self, residency: Residency) -> float:
        """Return the seconds in which the engine allocates memory, up to `residency`."""
        # A receiver restores its weights before the rest.
        first = residency is Residency.WEIGHTS or not self.engine.spec.weights_from
        return server_wake_seconds(self.weight_bytes if first else 0.0, self.backed_up_bytes, self.device)

    def save(self, *, background: bool) -> float:
        """Return the seconds of a checkpoint, or only of its copy to the host if a `background` process writes it."""
        nbytes = self.weight_bytes + self.state_bytes
        if background:
            return _SAVE_S + nbytes / self.device.to_host
        return _SAVE_S + (nbytes + self.state_bytes_on_host) * self.engine.per_node / _DISK_BYTES_PER_S


class ServerCosts(EngineCosts):
    """Seconds of one engine of servers."""

    scores_share_prompts: ClassVar[bool] = True
    """Whether rows to score use the cache of a common prompt."""

    def forward(self, batch: PlannedBatch) -> float:
        """Return the seconds of the log-probs of given tokens: a prefill, and the head at the tokens of responses."""
        rows, lengths = batch.rows / self.engine.executor.replicas, batch.lengths
        shared = batch.per_prompt if self.scores_share_prompts and self.server.shares_prompts else 1
        tokens = rows * (lengths.prompt / shared + lengths.response)
        return self.server.prefill(tokens, lengths.row) + self.server.predictions(rows * lengths.response)


def server_sleep_seconds(kept: float, device: DeviceRates, *, ranks: int) -> float:
    """Return the seconds in which generators free their GPUs; `kept` bytes of each go to the host."""
    return (_SERVER_SLEEP_S if ranks == 1 else _SERVERS_SLEEP_S) + kept / device.to_host


def server_wake_seconds(weights: float, kept: float, device: DeviceRates) -> float:
    """Return the seconds in which generators allocate `weights` bytes on each GPU; `kept` come from the host."""
    return _SERVER_WAKE_S + weights / _RETURN_BYTES_PER_S + kept / device.from_host
