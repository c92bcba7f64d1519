"""Seconds of an optimizer step of a Megatron engine: gradients are reduced over replicas, and weights gathered.

With the distributed optimizer each replica keeps its share of the states (ZeRO, arXiv 1910.02054). Context-parallel
ranks count as replicas; the experts of a mixture have fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

from dagrl.backends.device_rates import DeviceRates
from dagrl.backends.megatron.planning.memory import state_bytes
from dagrl.backends.megatron.planning.stages import RankParameters, replicas_of_parameters
from dagrl.backends.megatron.section import MegatronEngineSpec

_WEIGHT_BYTES = 2
_ADAM_BYTES = 10
"""Read and written for a parameter: gradient (4) and its norm (4), weight (2), besides the states, both ways."""
_ZERO_BYTES = 4
STATE_BYTES = 12
"""Float32 weight and two moments, by default."""
_EXPOSED = 0.15
"""Share of a reduction or gathering that does not overlap with the passes: the last bucket."""
_BEGIN_S = 3e-3
"""Adam's kernels, and the norm on the host."""
_HOST_ADAM_BYTES_PER_S = 30e9
"""Rate of torch's Adam on a host, for each GPU; an order of magnitude, not measured."""
_HOST_ADAM_BYTES = 28


@dataclass(frozen=True, slots=True)
class OptimizerSteps:
    """Optimizer steps of an engine on so many ranks."""

    held: RankParameters
    spec: MegatronEngineSpec
    ranks: int
    per_node: int
    device: DeviceRates

    def seconds(self) -> float:
        """Return the seconds of one step."""
        return _BEGIN_S + self._reduce() + self._adam() + self._gather()

    @property
    def own_share(self) -> float:
        """Parameters whose states a rank keeps."""
        if not self.spec.optimizer.get("use_distributed_optimizer", True):
            return self.held.total
        dense, experts = self._copies
        return self.held.dense / dense + self.held.experts / experts

    @property
    def state_bytes(self) -> float:
        """Bytes of the states on a rank's GPU."""
        fields = self.spec.optimizer
        # A step on the host needs all states in float32.
        each = STATE_BYTES if fields.get("optimizer_cpu_offload") else state_bytes(fields, _WEIGHT_BYTES)
        return self.own_share * each * (1 - self._on_host)

    @property
    def state_bytes_on_host(self) -> float:
        """Bytes of the states whose step runs on the host."""
        return self.own_share * STATE_BYTES * self._on_host

    @property
    def _copies(self) -> tuple[int, int]:
        return replicas_of_parameters(self.spec.parallel, self.ranks)

    @property
    def _on_host(self) -> float:
        """Share of the parameters whose step runs on the host."""
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
        """Return the seconds to scatter or gather `each` bytes of every parameter among ranks that hold the same."""
        link = self.device.link(self.ranks // self.spec.parallel.pipeline_model_parallel_size, self.per_node)
        held = zip((self.held.dense, self.held.experts), self._copies, strict=True)
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
