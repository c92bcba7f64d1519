"""Builds SGLang's ServerArgs from a pipeline file. For SGLang 0.5.17."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from dagrl.backends.sglang.layout import CPU_CACHE_TOKENS, KEPT_BACK, LARGEST_GRAPH, SLEEPER_FRACTION
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.backends.sglang.share import ServerShare

WEIGHT_LOADER = "dagrl.backends.sglang.loader.update_weights"
"""Function that SGLang calls in its processes for an update."""

_DEFAULTS: dict[str, Any] = {"log_level": "warning"}
_GPU_DEFAULTS: dict[str, Any] = {
    "dtype": "bfloat16",
    # Capturing prefill graphs adds a minute to each start, and a rollout is mostly decoding.
    "cuda_graph_backend_prefill": "disabled",
}
_SLEEPER_DEFAULTS: dict[str, Any] = {"mem_fraction_static": SLEEPER_FRACTION}
_CPU_DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    # A fraction of the machine's free memory, which other processes use while the model loads. The cache's size is
    # limited separately.
    "mem_fraction_static": 0.8,
    "max_total_tokens": CPU_CACHE_TOKENS,
    # An idle scheduler would keep a core busy.
    "sleep_on_idle": True,
}


def server_arguments(
    spec: SglangEngineSpec, share: ServerShare, folder: Path, *, positions: int, seed: int, sleeps: bool
) -> dict[str, Any]:
    """Keyword arguments of ServerArgs for one machine's share of a server, for a model with so many positions."""
    on_gpus = bool(share.gpus)
    saves_memory = on_gpus and sleeps
    defaults = _DEFAULTS | (_GPU_DEFAULTS if on_gpus else _CPU_DEFAULTS) | (_SLEEPER_DEFAULTS if saves_memory else {})
    given = defaults | spec.server
    if on_gpus and not any(field.startswith(("cuda_graph_bs", "cuda_graph_max_bs")) for field in spec.server):
        given["cuda_graph_max_bs_decode"] = min(given.get("max_running_requests") or LARGEST_GRAPH, LARGEST_GRAPH)
    return given | {
        "model_path": str(folder),
        # Samples may use the context of the file, or of the model, in full.
        "context_length": (given.get("context_length") or positions) + KEPT_BACK,
        "load_format": "dummy" if spec.weights_from else given.get("load_format", "auto"),
        "skip_tokenizer_init": True,
        "custom_weight_loader": [WEIGHT_LOADER],
        "device": "cuda" if on_gpus else "cpu",
        "random_seed": _seed(seed, share.server),
        "enable_memory_saver": saves_memory,
        # Weights that are not sent again must be backed up.
        "enable_weights_cpu_backup": saves_memory and spec.weights_from is None,
        **_meeting_point(spec, share),
    }


def _meeting_point(spec: SglangEngineSpec, share: ServerShare) -> dict[str, Any]:
    if share.nodes > 1 or spec.server.get("enable_dp_attention"):
        return {
            "dist_init_addr": f"{share.address}:{share.port}",
            "nnodes": share.nodes,
            "node_rank": share.node,
        }
    return {"nccl_port": share.port}


def _seed(seed: int, server: int) -> int:
    """A different seed per server, in the 31 bits that SGLang accepts."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{server}".encode()).digest()[:4]) >> 1
