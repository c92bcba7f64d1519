"""Builds SGLang's ServerArgs from a pipeline file. For SGLang 0.5.17."""

from __future__ import annotations

from pathlib import Path

from dagrl.backends.serving.share import ServerShare
from dagrl.backends.sglang.adapters import LAYERS
from dagrl.backends.sglang.layout import CPU_CACHE_TOKENS, FUSED, KEPT_BACK, LARGEST_GRAPH, SLEEPER_FRACTION
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.config.schema.engine import SentAdapter

WEIGHT_LOADER = "dagrl.backends.sglang.loader.update_weights"
"""Function that SGLang calls in its processes for an update."""
ADAPTER_LOADER = "dagrl.backends.sglang.loader.update_adapters"
"""The same for an update of low-rank adapters."""

_DEFAULTS: dict[str, object] = {"log_level": "warning"}
_GPU_DEFAULTS: dict[str, object] = {
    "dtype": "bfloat16",
    # Capturing prefill graphs adds a minute to each start, and a rollout is mostly decoding.
    "cuda_graph_backend_prefill": "disabled",
    "sampling_backend": FUSED,
}
_SLEEPER_DEFAULTS: dict[str, object] = {"mem_fraction_static": SLEEPER_FRACTION}
_CPU_DEFAULTS: dict[str, object] = {
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
    spec: SglangEngineSpec,
    share: ServerShare,
    folder: Path,
    *,
    positions: int,
) -> dict[str, object]:
    """Keyword arguments of ServerArgs for one machine's share of a server, for a model with these `positions`."""
    on_gpus, sleeps, adapter = bool(share.gpus), share.sleeps, share.adapter
    own_weights = spec.weights_from is None or adapter is not None
    saves_memory = on_gpus and sleeps
    defaults = _DEFAULTS | (_GPU_DEFAULTS if on_gpus else _CPU_DEFAULTS) | (_SLEEPER_DEFAULTS if saves_memory else {})
    given = defaults | (_adapter_arguments(adapter, on_gpus) if adapter is not None else {}) | spec.server
    if on_gpus and not any(field.startswith(("cuda_graph_bs", "cuda_graph_max_bs")) for field in spec.server):
        given["cuda_graph_max_bs_decode"] = min(spec.server.get("max_running_requests") or LARGEST_GRAPH, LARGEST_GRAPH)
    if spec.page_size > 1:
        given["page_size"] = spec.page_size
    return given | {
        "model_path": str(folder),
        # Samples may use the context of the file, or of the model, in full.
        "context_length": (spec.server.get("context_length") or positions) + KEPT_BACK,
        "load_format": given.get("load_format", "auto") if own_weights else "dummy",
        "skip_tokenizer_init": True,
        "custom_weight_loader": [WEIGHT_LOADER, ADAPTER_LOADER],
        "device": "cuda" if on_gpus else "cpu",
        "random_seed": share.seed,
        "enable_memory_saver": saves_memory,
        # Weights that are not sent again must be backed up.
        "enable_weights_cpu_backup": saves_memory and own_weights,
        **_meeting_point(spec, share),
    }


def _adapter_arguments(adapter: SentAdapter, on_gpus: bool) -> dict[str, object]:
    return {
        "enable_lora": True,
        "max_loras_per_batch": 1,
        "max_lora_rank": adapter.rank,
        "lora_target_modules": LAYERS,
        **({} if on_gpus else {"lora_backend": "torch_native"}),
    }


def _meeting_point(spec: SglangEngineSpec, share: ServerShare) -> dict[str, object]:
    if share.nodes > 1 or spec.server.get("enable_dp_attention"):
        return {
            "dist_init_addr": f"{share.ranks.master_addr}:{share.ranks.master_port}",
            "nnodes": share.nodes,
            "node_rank": share.node,
        }
    return {"nccl_port": share.ranks.master_port}
