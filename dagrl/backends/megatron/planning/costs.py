"""Seconds of a Megatron engine: its passes, its optimizer, and its moves between GPU and host; and its communicators.

NCCL connects a communicator when its ranks first meet in it. The counts of groups were observed in each layout. An
engine that closes them when it sleeps reconnects the groups of its passes and updates.
"""

from __future__ import annotations

from functools import cached_property

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.lora import adapters
from dagrl.backends.megatron.planning.passes import Passes
from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec
from dagrl.backends.planning.costs import WEIGHT_BYTES, EngineCosts, PlannedBatch
from dagrl.backends.planning.device_rates import DeviceRates
from dagrl.backends.planning.memory import GIB
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.config.residency import Residency

_COMMUNICATOR = 0.53 * GIB
"""Buffers of one; measured on H200s with two ranks, 0.53 GiB. Kept, they were 2.13 GiB with DP2, which has four."""
_STAGES = 0.26 * GIB
"""In addition, if its ranks also send to each other in pairs: 0.79 GiB in all between pipeline stages (H200s)."""
_RING = 0.32 * GIB
"""The same for the ring of context parallelism: 0.85 GiB in all (H200s)."""
_GATHERED = 0.4 * GIB
"""The same for tensor-parallel ranks that gather weights for a sync: 0.38 to 0.44 GiB (H200s)."""
CLOSE_S = 0.42
"""Seconds to close all of them: 0.34 to 0.49 s with two ranks in any layout."""
CONNECT_S = 0.12
"""Seconds to connect one: the first log-probs after a wake take 0.08 to 0.15 s longer, 1.7B and 8B, TP2 and PP2."""
CONNECT_PAIRS_S = 0.07
"""Seconds to connect ranks in pairs, which gather the shards of a sync: 0.03 to 0.05 s with TP2, 0.1 s with PP2."""


def communicator_bytes(
    shape: ModelShape, parallel: ParallelSpec, ranks: int, *, trains: bool, sends: bool, closes: bool
) -> int:
    """Return the bytes on each GPU of an engine that trains, sends its weights, or closes communicators in a sleep."""
    if ranks == 1:
        return 0
    count = groups_of_pass(shape, parallel, ranks)
    if trains:
        # An optimizer gathers the states of all ranks once, when it is built.
        count += groups_of_update(shape, parallel, ranks) + (not closes)
    total = count * _COMMUNICATOR
    total += _STAGES if parallel.pp > 1 else 0
    total += _RING if parallel.cp > 1 else 0
    total += _GATHERED if sends and not closes and parallel.tp > 1 else 0
    return int(total)


def groups_of_pass(shape: ModelShape, parallel: ParallelSpec, ranks: int) -> int:
    """Count the groups of several ranks that meet in a pass."""
    sizes = [parallel.tp, parallel.pp, parallel.cp]
    if shape.experts is not None:
        # Ranks of different experts, of parts of one, of either; and replicas, which compare their micro-batches.
        sizes += [parallel.ep, parallel.etp, parallel.expert_ranks, parallel.data_parallel_size(ranks)]
    return _shared(sizes)


def groups_of_update(shape: ModelShape, parallel: ParallelSpec, ranks: int) -> int:
    """Count the further groups that meet in an update."""
    replicas, stages = parallel.data_parallel_size(ranks), parallel.pp
    sizes = [
        ranks,  # The norm of the gradient.
        replicas * parallel.cp,  # Gradients, and the weights after the step.
    ]
    if shape.tied:
        sizes.append(stages)  # The gradient of an embedding that is the output layer too.
    if shape.experts is None:
        sizes.append(replicas)  # The divisor of the loss. The replicas of a mixture have met in the pass.
    elif parallel.etp != parallel.tp or parallel.ep > 1:
        # The ranks with the same experts differ from the ranks with the same other parameters, so Megatron has a group
        # for each.
        sizes.append(ranks // stages // parallel.expert_ranks)
    return _shared(sizes)


def _shared(sizes: list[int]) -> int:
    return sum(size > 1 for size in sizes)


_DOWN_S = 0.06
"""A trainer keeps its weights alone: the memory of its passes is freed (0.06 to 0.16 s)."""
_DOWN_OF_SEVERAL_S = 0.15
"""The same for the slower of two ranks: 0.15 s on average of 16 sleeps in eight runs (0.07 to 0.31)."""
_SLEEP_S = 0.01
"""The same from weights alone to asleep."""
_OPEN_S = 0.02
"""Several ranks wake: groups are created; communicators connect in the first task."""


class MegatronCosts(EngineCosts):
    """Seconds of one Megatron engine."""

    engine: PlannedEngine[MegatronEngineSpec]

    @cached_property
    def passes(self) -> Passes:
        engine = self.engine
        return Passes(engine.shape, engine.spec, engine.group.ranks, engine.per_node, self.device)

    @property
    def weight_bytes(self) -> float:
        return self.passes.held.total * WEIGHT_BYTES

    @property
    def state_bytes(self) -> float:
        return self.passes.states.on_device if self.engine.executor.trained else 0.0

    @property
    def state_bytes_on_host(self) -> float:
        return self.passes.states.on_host if self.engine.executor.trained else 0.0

    def forward(self, batch: PlannedBatch) -> float:
        return self.passes.forward(batch)

    def update(self, batch: PlannedBatch) -> float:
        return self.passes.train(batch) + self.passes.optimizer_step()

    @property
    def passes_of_update(self) -> int:
        return 2 if self.engine.spec.lora else 3

    @property
    def load_s(self) -> float:
        if not self.engine.spec.offload.param:
            return 0.0
        return self.weight_bytes * (1 / self.device.from_host + 1 / self.device.to_host)

    @property
    def multiplies_in_fp8(self) -> bool:
        return self.engine.spec.fp8_recipe is not None

    @property
    def sent_parameters(self) -> float:
        if self.engine.spec.sent_adapter is None:
            return self.parameters
        lora, shape = self.engine.spec.lora, self.engine.shape
        assert lora is not None
        tensors = (tensor for layer in shape.positions for tensor in shape.layer_tensors(layer))
        return sum(adapter.numel for adapter in adapters(tensors, lora))

    @property
    def load_to_send_s(self) -> float:
        return 0.0 if self.engine.spec.sent_adapter else self.load_s

    @property
    def swap_s(self) -> float:
        """None with adapters, because the model without them has its start weights."""
        return 0.0 if self.engine.spec.lora else super().swap_s

    def reconnect_s(self, *, updates: bool) -> float:
        engine = self.engine
        if not self._closes_communicators:
            return 0.0
        groups = groups_of_update if updates else groups_of_pass
        return CONNECT_S * groups(engine.shape, engine.spec.parallel, engine.group.ranks)

    @property
    def gathered_share(self) -> float:
        return max(0.0, 1 - self.passes.held.total / self.engine.shape.parameters)

    @property
    def owned_share(self) -> float:
        """The first tensor-parallel rank of a stage, or of experts, also holds the parts of the others."""
        return min(1.0, (1 - self.gathered_share) * self.engine.spec.parallel.tp)

    @property
    def gather_rate(self) -> float:
        """The rate to those ranks: pipeline stages are as far from each other as the group reaches."""
        engine = self.engine
        staged = engine.spec.parallel.pp > 1
        return self.device.link(engine.group.ranks if staged else self._weight_ranks, engine.per_node)

    @property
    def reconnect_to_send_s(self) -> float:
        return CONNECT_PAIRS_S if self._closes_communicators and self._weight_ranks > 1 else 0.0

    def sleep(self, residency: Residency) -> float:
        weights, state = self._moved
        ranks = self.engine.group.ranks
        if residency is Residency.WEIGHTS:
            return trainer_down_seconds(state, self.device, ranks=ranks)
        # An engine that sends weights within its own group has freed all but its weights before the sync.
        moved = weights + (0.0 if self._sends_at_home else state)
        return trainer_sleep_seconds(moved, self.device, closing=self._closing)

    def wake(self, residency: Residency) -> float:
        weights, state = self._moved
        moved = weights + (state if residency is Residency.AWAKE else 0.0)
        return trainer_wake_seconds(moved, self.device, closed=self._closing)

    @property
    def _weight_ranks(self) -> int:
        """Ranks that hold one copy of the weights: experts go beyond replicas, and context does not count."""
        sizes = self.engine.spec.parallel
        return sizes.pp * max(sizes.tp, 1 if self.engine.shape.experts is None else sizes.expert_ranks)

    @property
    def _moved(self) -> tuple[float, float]:
        offload = self.engine.spec.offload
        return 0.0 if offload.param else self.weight_bytes, 0.0 if offload.optimizer else self.state_bytes

    @property
    def _closing(self) -> int:
        return 0 if self.engine.spec.keep_communicators else self.engine.group.ranks

    @property
    def _closes_communicators(self) -> bool:
        return self.device.is_gpu and not self.engine.spec.keep_communicators

    @property
    def _sends_at_home(self) -> bool:
        executors, ours = self.engine.plan.executors, self.engine.executor
        return any(other.weights_from == ours.name and other.group == ours.group for other in executors.values())


def trainer_down_seconds(kept: float, device: DeviceRates, *, ranks: int) -> float:
    """Return the seconds in which a trainer frees all but its weights; `kept` bytes of each GPU go to the host."""
    fixed = _DOWN_S if ranks == 1 else _DOWN_OF_SEVERAL_S
    return (fixed if device.is_gpu else 0.0) + kept / device.to_host


def trainer_sleep_seconds(kept: float, device: DeviceRates, *, closing: int) -> float:
    """Return the seconds in which a trainer leaves its GPUs; `closing` ranks close their communicators."""
    if not device.is_gpu:
        return kept / device.to_host
    return _SLEEP_S + kept / device.to_host + (CLOSE_S if closing > 1 else 0.0)


def trainer_wake_seconds(kept: float, device: DeviceRates, *, closed: int) -> float:
    """Return the seconds in which a trainer wakes, without reconnecting communicators that `closed` ranks closed."""
    return kept / device.from_host + (_OPEN_S if device.is_gpu and closed > 1 else 0.0)
