"""Rates that one rank reaches in practice, as shares of the figures in the data sheet of its GPU.

Every share names its source. "Measured" is benchmarks/RESULTS.md and ``train_step.py``, ``rollout.py`` and
``weight_sync.py`` beside it, on H200s with 1.7B and 8B parameters; tests/planner/cost/test_measured.py compares the
estimates with all of those figures. Other GPUs have the shares of H200s unless a comment says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from dagrl.backends.planning.gpus import Gpu

_MATMUL_SHARE = 0.69
"""Share of the bfloat16 peak in the matrix products of training: fitted to the log-prob passes of 1.7B (521 TFLOP/s in
all) and 8B with TP2 (497). A product of 8192^3 alone reaches 0.81."""
_MATMUL_SHARE_AMPERE = 0.78
"""Slower tensor cores are easier to feed: 52 % of an A100's peak over whole steps (arXiv 2104.04473)."""
_AMPERE_TFLOPS = 320.0
_ATTENTION_SHARE = 0.40
"""FlashAttention 3, packed and causal, forward; rows of 2048 tokens."""
_DECODE_MATMUL_SHARE = 0.60
"""Products of some hundred rows at a time, in decoding."""
_FP8_SHARES = {"block": 0.67, "whole": 0.78}
"""Share of the gain by the data sheet that linear layers reach in fp8, with scales of blocks, and of whole tensors or
channels: fitted to updates of 8B and to steps of decoding."""
_MEMORY_SHARE = 0.78
"""Share of the memory's bandwidth in kernels that mostly read and write: norms, activations, the optimizer."""
_DECODE_MEMORY_SHARE = 0.85
"""The same for the reads of decoding: weights, and the cache by FlashAttention. A copy alone reaches 0.90."""
_PEERS_SHARE = 0.70
"""Share of NVLink in NCCL's collectives: 300 to 360 of 450 GB/s on H200s, with 64 to 512 MiB."""
_NETWORK_SHARE = 0.75
"""Share of the network in NCCL's collectives; not measured."""
_FROM_HOST_SHARE = 0.76
"""Share of PCIe from pinned memory: a trainer of 1.7B wakes with 49 GB/s of 64 (benchmarks/plan_accuracy.py)."""
_TO_HOST_SHARE = 0.74
"""The other way: 46 to 48 GB/s of 64, in the same runs."""

_CPU = {
    "matmul": 20e9,
    "attention": 10e9,
    "decode_matmul": 10e9,
    "memory": 5e9,
    "decode_memory": 5e9,
    "peers": 0.5e9,
    "network": 0.2e9,
    "from_host": 5e9,
    "to_host": 5e9,
}
"""One thread of a CPU in float32: orders of magnitude, for pipelines that are tried out."""


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Rates that a rank reaches: operations a second, and bytes a second."""

    matmul: float
    attention: float
    decode_matmul: float
    memory: float
    decode_memory: float
    peers: float
    """To another rank of its machine, each direction."""
    network: float
    """To a rank of another machine."""
    from_host: float
    to_host: float
    is_gpu: bool
    fp8_gain: float = 1.0
    """Rate of matrix products in fp8, in units of that in 16 bits, by the data sheet."""

    def link(self, span: int, per_node: int) -> float:
        """Return the rate between ranks that lie within `span` neighbouring ones, with `per_node` on a machine."""
        return self.peers if span <= per_node else self.network

    def fp8_speedup(self, *, by_block: bool) -> float:
        """Return how many times as fast linear layers multiply in fp8, with scales of blocks or of whole tensors."""
        return max(1.0, self.fp8_gain * _FP8_SHARES["block" if by_block else "whole"])


def rates_of(gpu: Gpu | None) -> DeviceRates:
    """Return the rates of a rank on such a GPU; None is a CPU slot."""
    if gpu is None:
        return DeviceRates(**_CPU, is_gpu=False)
    peak, memory, pcie = gpu.tflops * 1e12, gpu.memory_gb_per_s * 1e9, gpu.pcie_gb_per_s * 1e9
    ampere = gpu.tflops < _AMPERE_TFLOPS
    return DeviceRates(
        matmul=peak * (_MATMUL_SHARE_AMPERE if ampere else _MATMUL_SHARE),
        attention=peak * _ATTENTION_SHARE,
        decode_matmul=peak * _DECODE_MATMUL_SHARE,
        memory=memory * _MEMORY_SHARE,
        decode_memory=memory * _DECODE_MEMORY_SHARE,
        # Without NVLink, NCCL goes over PCIe.
        peers=(gpu.nvlink_gb_per_s * 1e9 or pcie) * _PEERS_SHARE,
        network=gpu.network_gb_per_s * 1e9 * _NETWORK_SHARE,
        from_host=pcie * _FROM_HOST_SHARE,
        to_host=pcie * _TO_HOST_SHARE,
        is_gpu=True,
        fp8_gain=gpu.fp8_tflops / gpu.tflops,
    )
