"""Seconds of a batch through a Megatron engine, and of its optimizer's step.

The schedule is Megatron's ("Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", arXiv
2104.04473, section 2.2): with p stages of v chunks and m micro-batches, filling and draining the pipeline takes ``(p -
1) / v`` of a micro-batch's forward and backward time, in addition to the m of the slowest stage.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.planning.layers import LayerSeconds, Pack, Recompute, Seconds
from dagrl.backends.megatron.planning.stages import (
    OptimizerStates,
    RankParameters,
    Stage,
    optimizer_states,
    rank_parameters,
    replicas_of_parameters,
    stages_of,
)
from dagrl.backends.megatron.section import SHORTEST_SHARED, MegatronEngineSpec
from dagrl.backends.planning.costs import WEIGHT_BYTES, PlannedBatch
from dagrl.backends.planning.device_rates import DeviceRates

_BEGIN_S = 10e-3
"""To pack a batch, agree on its micro-batches and return the result."""
_STAGE_S = 0.2e-3
"""Start of a message between stages, with its length before it."""
_ADDED_BYTES = 10
"""A weight's gradient read (2), and its sum read and written (8)."""
_ADAM_BYTES = 10
"""Read and written for a parameter: gradient (4) and its norm (4), weight (2), besides the states, both ways."""
_ZERO_BYTES = 4
_EXPOSED = 0.15
"""Share of a reduction or gathering that does not overlap with the passes: the last bucket."""
_BEGIN_STEP_S = 3e-3
"""Adam's kernels, and the norm on the host."""
_HOST_ADAM_BYTES_PER_S = 30e9
"""Rate of torch's Adam on a host, for each GPU; an order of magnitude, not measured."""
_HOST_ADAM_BYTES = 28
_SHARING = Seconds(0.18e-3, 0.27e-3)
"""Seconds that `prefix_sharing` adds to a layer for each micro-batch on a GPU: keys and values are gathered, and their
gradients summed. Fitted to steps of 1.7B (benchmarks/plan_accuracy.py)."""


@dataclass(frozen=True)
class Passes:
    """Passes and optimizer steps of a model in its layout."""

    shape: ModelShape
    spec: MegatronEngineSpec
    ranks: int
    per_node: int
    device: DeviceRates

    @property
    def replicas(self) -> int:
        return self.spec.parallel.data_parallel_size(self.ranks)

    @cached_property
    def held(self) -> RankParameters:
        held = (rank_parameters(self.shape, self.spec, stage) for stage in self._stages)
        return max(held, key=lambda parameters: parameters.total)

    @cached_property
    def states(self) -> OptimizerStates:
        return optimizer_states(self.held, self.spec, self.ranks, WEIGHT_BYTES)

    def forward(self, batch: PlannedBatch) -> float:
        count, pack = self.micro_batches(batch)
        sent = self._sent(pack)
        stages = [stage.forward + sent for stage in self._of_stages(pack)]
        return _BEGIN_S + count * max(stages) + (sum(stages) - max(stages)) / self._chunks

    def train(self, batch: PlannedBatch) -> float:
        count, pack = self.micro_batches(batch)
        # Gradients are added to float32 buffers, weight by weight.
        added = sum(self.held.trained) * _ADDED_BYTES / self.device.memory
        sent = 2 * self._sent(pack)
        again = self.spec.fused_linear_cross_entropy and not batch.sums_over_tokens
        stages = [stage.forward + stage.backward + sent for stage in self._of_stages(pack, logits_again=again)]
        return _BEGIN_S + count * (max(stages) + added) + (sum(stages) - max(stages)) / self._chunks

    def micro_batches(self, batch: PlannedBatch) -> tuple[int, Pack]:
        """Return the number of micro-batches of a replica, and their mean."""
        rows = max(1.0, batch.rows / self.replicas)
        alignment = self.spec.parallel.row_alignment
        row: float = math.ceil(batch.lengths.row / alignment) * alignment
        square = batch.lengths.mean_square
        prompt = batch.lengths.prompt
        if self.spec.prefix_sharing and prompt >= SHORTEST_SHARED:
            # All rows that fit into a micro-batch share a prompt.
            sharing = min(batch.per_prompt, max(1, int((batch.budget - prompt) // (row - prompt))))
            saved = 1 - 1 / sharing
            row, square = row - saved * prompt, square - saved * prompt**2
        if batch.lengths.varied:
            count = math.ceil(rows * row / batch.budget)
        else:
            count = math.ceil(math.ceil(rows) / max(1, int(batch.budget // row)))
        if self._chunks > 1:
            stages = self.spec.transformer.get("microbatch_group_size_per_vp_stage")
            stages = stages if isinstance(stages, int) else self.spec.parallel.pp
            # The interleaved schedule takes them in rounds.
            count = math.ceil(count / stages) * stages
        per_pack = rows / count
        return count, Pack(per_pack * row, per_pack * square, per_pack * batch.lengths.response)

    def optimizer_step(self) -> float:
        ddp, sharded = self.spec.ddp, self.spec.optimizer.get("use_distributed_optimizer", True)
        gradient = 4 if ddp.get("grad_reduce_in_fp32", True) else 2
        reduced = (_EXPOSED if ddp.get("overlap_grad_reduce") else 1.0) * self._collective(gradient)
        gathered = (_EXPOSED if ddp.get("overlap_param_gather") else 1.0) * self._collective(WEIGHT_BYTES)
        return _BEGIN_STEP_S + self._adam() + (reduced + gathered if sharded else 2 * reduced)

    # -- parts

    def _collective(self, nbytes: int) -> float:
        link = self.device.link(self.ranks // self.spec.parallel.pp, self.per_node)
        copies = replicas_of_parameters(self.spec.parallel, self.ranks)
        held = zip(self.held.trained, copies, strict=True)
        return sum(nbytes * parameters * (count - 1) / count for parameters, count in held) / link

    def _adam(self) -> float:
        states, on_device = self.states, self.states.on_device
        own = states.parameters * (1 - states.host_share)
        moved = _ZERO_BYTES * sum(self.held.trained) + own * _ADAM_BYTES + 2 * on_device
        seconds = moved / self.device.memory
        there = states.parameters * states.host_share
        seconds += there * (4 / self.device.to_host + WEIGHT_BYTES / self.device.from_host)
        seconds += there * _HOST_ADAM_BYTES / _HOST_ADAM_BYTES_PER_S
        if self.spec.offload.optimizer:
            seconds += on_device * (1 / self.device.to_host + 1 / self.device.from_host)
        return seconds

    @property
    def _chunks(self) -> int:
        return self.spec.parallel.chunks

    @cached_property
    def _seconds(self) -> LayerSeconds:
        recompute = recompute_of(self.spec, self.shape)
        return LayerSeconds(
            self.shape,
            self.spec.parallel,
            self.device,
            self.per_node,
            recompute,
            frozen=self.spec.lora is not None,
            fp8=self.spec.fp8_recipe,
        )

    @cached_property
    def _stages(self) -> list[Stage]:
        return stages_of(self.spec, self.shape.layers)

    def _of_stages(self, pack: Pack, *, logits_again: bool = False) -> list[Seconds]:
        kinds = {self.shape.is_mixture(layer): layer for layer in self.shape.positions}
        added = _SHARING if self.spec.prefix_sharing and self.device.is_gpu else Seconds(0.0, 0.0)
        seconds = {kind: self._seconds.of(pack, layer) + added for kind, layer in kinds.items()}
        stages = []
        for stage in self._stages:
            total = self._head(pack, logits_again) if stage.is_last else Seconds(0.0, 0.0)
            for kind, count in Counter(self.shape.is_mixture(layer) for layer in stage.layers).items():
                total += seconds[kind].times(count)
            stages.append(total)
        return stages

    def _head(self, pack: Pack, logits_again: bool) -> Seconds:
        outputs = None if self.spec.head == "lm" else 1
        return self._seconds.head(pack, outputs=outputs, again=logits_again)

    def _sent(self, pack: Pack) -> float:
        """Return the seconds of one micro-batch between two stages, in one direction: once for each chunk."""
        sizes = self.spec.parallel
        if sizes.pp == 1:
            return 0.0
        parts = sizes.cp * (sizes.tp if sizes.sequence_parallel else 1)
        size = pack.tokens * self.shape.hidden * WEIGHT_BYTES / parts
        return self._chunks * (size / self.device.link(self.ranks, self.per_node) + _STAGE_S)


def recompute_of(spec: MegatronEngineSpec, shape: ModelShape) -> Recompute:
    """Read the fields of ``transformer:`` on recomputation, with Megatron's defaults."""
    fields = spec.transformer
    match fields.get("recompute_granularity"):
        case "full" if fields.get("recompute_method") == "block":
            stages = spec.parallel.pp
            layers = shape.layers / stages / spec.parallel.chunks
            return Recompute(whole=min(1.0, (fields.get("recompute_num_layers") or 1) / layers))
        case "full":
            return Recompute(whole=1.0)
        case "selective":
            return Recompute(modules=frozenset(fields.get("recompute_modules") or ("core_attn",)))
    return Recompute()
