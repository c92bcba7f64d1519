"""Bytes of an optimizer's states on a rank, for the memory estimate and for the cost model.

With the distributed optimizer each replica keeps its share of the states (ZeRO, arXiv 1910.02054). Context-parallel
ranks count as replicas; the experts of a mixture have fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagrl.backends.megatron.planning.stages import RankParameters, replicas_of_parameters
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.model_files.number_formats import NUMBER_FORMATS

STATE_BYTES = 12
"""Float32 weight and two moments, by default."""


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """States that one rank keeps between steps."""

    parameters: float
    """Parameters whose states the rank keeps."""
    each: int
    """Bytes of one parameter's states."""
    host_share: float
    """Share of the parameters whose states and step are on the host."""

    @property
    def on_device(self) -> float:
        return self.parameters * self.each * (1 - self.host_share)

    @property
    def on_host(self) -> float:
        return self.parameters * self.each * self.host_share


def optimizer_states(held: RankParameters, spec: MegatronEngineSpec, ranks: int, value: int) -> OptimizerStates:
    """Count the states of a rank with parameters of `value` bytes."""
    fields = spec.optimizer
    parameters = float(sum(held.trained))
    if fields.get("use_distributed_optimizer", True):
        dense, experts = replicas_of_parameters(spec.parallel, ranks)
        parameters = held.trained[0] / dense + held.trained[1] / experts
    if fields.get("optimizer_cpu_offload"):
        # A step on the host needs all states in float32.
        return OptimizerStates(parameters, STATE_BYTES, float(fields.get("optimizer_offload_fraction", 1.0)))
    return OptimizerStates(parameters, _state_bytes(fields, value), 0.0)


def _state_bytes(fields: dict[str, Any], value: int) -> int:
    """Return the bytes for one parameter: its float32 weight, if the model has fewer bits, and the moments."""
    precise = bool(fields.get("use_precision_aware_optimizer"))

    def number(name: str) -> int:
        return NUMBER_FORMATS[fields.get(name, "fp32")].nbytes if precise else 4

    moments = number("exp_avg_dtype") + number("exp_avg_sq_dtype")
    if fields.get("optimizer", "adam") == "sgd":
        moments = 4 if fields.get("sgd_momentum", 0.9) else 0
    if value == 4:
        return moments
    main = number("main_params_dtype")
    # The remainder of a bfloat16 weight is two bytes.
    if precise and main == 4 and fields.get("store_param_remainders", True):
        main = 2
    return main + moments
