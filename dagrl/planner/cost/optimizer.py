"""Seconds of an optimizer step of a Megatron engine: gradients joined over replicas, Adam, weights told to all.

With the distributed optimizer each replica keeps its share of the states (ZeRO, arXiv 1910.02054): gradients are
scattered, and weights gathered afterwards. Context-parallel ranks count as replicas; a mixture's experts have fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.planner.cost.device import Device
from dagrl.planner.memory.parameters import RankParameters
from dagrl.planner.memory.trainer import state_bytes

_WEIGHT_BYTES = 2
_ADAM_BYTES = 10
"""Read and written for a parameter: gradient (4) and its norm (4), weight (2), beside the states, both ways."""
_ZERO_BYTES = 4
STATE_BYTES = 12
"""Float32 weight and two moments, unless the optimizer says otherwise."""
_EXPOSED = 0.15
"""Of a reduction or gathering that overlaps with the passes: the last bucket."""
_BEGIN_S = 3e-3
"""Adam's kernels, the norm, and the host's look at it."""
_HOST_ADAM_BYTES_PER_S = 30e9
"""What torch's Adam moves on a host, for each GPU; an order of magnitude, not measured here."""
_HOST_ADAM_BYTES = 28


@dataclass(frozen=True, slots=True)
class OptimizerSteps:
    """Optimizer steps of an engine on so many ranks."""

    held: RankParameters
    spec: MegatronEngineSpec
    ranks: int
    per_node: int
    device: Device

    def seconds(self) -> float:
        """Of one."""
        return _BEGIN_S + self._reduce() + self._adam() + self._gather()

    @property
    def copies(self) -> tuple[int, int]:
        """Ranks that hold the same dense parameters, and the same experts."""
        sizes = self.spec.parallel
        stage = self.ranks // sizes.pipeline_model_parallel_size
        experts = sizes.expert_model_parallel_size * sizes.expert_tensor_parallel_size
        return stage // sizes.tensor_model_parallel_size, stage // experts

    @property
    def own_share(self) -> float:
        """Parameters whose states a rank keeps."""
        if not self.spec.optimizer.get("use_distributed_optimizer", True):
            return self.held.total
        dense, experts = self.copies
        return self.held.dense / dense + self.held.experts / experts

    @property
    def state_bytes(self) -> float:
        """Of the states on a rank's GPU, but for those whose step is taken on the host."""
        fields = self.spec.optimizer
        # Beside a step on the host nothing is kept in fewer bits.
        each = STATE_BYTES if fields.get("optimizer_cpu_offload") else state_bytes(fields, _WEIGHT_BYTES)
        return self.own_share * each * (1 - self._on_host)

    @property
    def state_bytes_on_host(self) -> float:
        """And of those."""
        return self.own_share * STATE_BYTES * self._on_host

    @property
    def _on_host(self) -> float:
        """Share of the parameters whose step is taken on the host."""
        fields = self.spec.optimizer
        return fields.get("optimizer_offload_fraction", 1.0) if fields.get("optimizer_cpu_offload") else 0.0

    def _reduce(self) -> float:
        each = 4 if self.spec.ddp.get("grad_reduce_in_fp32", True) else 2
        sharded = self.spec.optimizer.get("use_distributed_optimizer", True)
        exposed = _EXPOSED if self.spec.ddp.get("overlap_grad_reduce") else 1.0
        return exposed * (1 if sharded else 2) * self._collective(each)

    def _gather(self) -> float:
        if not self.spec.optimizer.get("use_distributed_optimizer", True):
            return 0.0
        exposed = _EXPOSED if self.spec.ddp.get("overlap_param_gather") else 1.0
        return exposed * self._collective(_WEIGHT_BYTES)

    def _collective(self, each: int) -> float:
        """Of `each` bytes for every parameter, scattered to, or gathered from, those that hold the same."""
        link = self.device.link(self.ranks // self.spec.parallel.pipeline_model_parallel_size, self.per_node)
        held = zip((self.held.dense, self.held.experts), self.copies, strict=True)
        return sum(each * parameters * (copies - 1) / copies for parameters, copies in held) / link

    def _adam(self) -> float:
        zero = _ZERO_BYTES * self.held.total / self.device.memory
        own, on_host, states = self.own_share, self._on_host, self.state_bytes
        seconds = zero + ((1 - on_host) * own * _ADAM_BYTES + 2 * states) / self.device.memory
        if on_host:
            moved = own * on_host * (4 / self.device.to_host + _WEIGHT_BYTES / self.device.from_host)
            seconds += moved + own * on_host * _HOST_ADAM_BYTES / _HOST_ADAM_BYTES_PER_S
        if self.spec.offload.optimizer:
            seconds += states * (1 / self.device.to_host + 1 / self.device.from_host)
        return seconds
