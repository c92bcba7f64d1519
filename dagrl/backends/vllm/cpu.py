"""Changes to vLLM 0.26.0 on CPUs, in its worker processes: weights can be loaded again, and routes are recorded."""

from __future__ import annotations

from typing import Any


def prepare() -> None:
    """Change vLLM, before it has loaded a model."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe

    # With oneDNN, linear layers keep a packed copy and drop the weights, which could then not be loaded again. On CPUs
    # without AMX, experts do the same for grouped products.
    _custom_ops._supports_onednn = False
    cpu_fused_moe.CPUFusedMOE.check_grouped_gemm = lambda self, layer: (False, "none")
    _record_routes(cpu_fused_moe)


def _record_routes(cpu_fused_moe: Any) -> None:
    """Have layers record the experts that they choose; vLLM records the choice of its router, which CPUs do not use."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    select, apply = cpu_fused_moe.select_experts, MoERunner._apply_quant_method
    chosen: list[Any] = []

    def select_and_keep(**arguments: Any) -> tuple[Any, Any]:
        weights, experts = select(**arguments)
        chosen[:] = [experts]
        return weights, experts

    def apply_and_record(self: Any, *args: Any, **arguments: Any) -> Any:
        result = apply(self, *args, **arguments)
        if self.router.capture_fn is not None:
            self.router.capture_fn(chosen.pop())
        return result

    cpu_fused_moe.select_experts, MoERunner._apply_quant_method = select_and_keep, apply_and_record
