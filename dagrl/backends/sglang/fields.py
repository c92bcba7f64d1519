"""Fields of SGLang's ServerArgs that are tested with dagrl, and fields that dagrl sets itself.

Checked against SGLang 0.5.17. Other fields go under ``extra:`` of an engine.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dagrl.config.errors import removal
from dagrl.config.schema.library_fields import UNSET, LibraryFields
from dagrl.config.schema.section import PositiveInt

_Graphs = Literal["full", "breakable", "tc_piecewise", "disabled"]


class ServerFields(LibraryFields):
    """Fields of SGLang's ServerArgs that are tested with dagrl; others go under ``extra``."""

    library_class: ClassVar = ("sglang", "srt/server_args.py", "ServerArgs")
    called_elsewhere: ClassVar = {
        **dict.fromkeys(("tensor_parallel_size", "tensor_model_parallel_size", "tp"), ("tp_size",)),
        **dict.fromkeys(("data_parallel_size", "dp"), ("dp_size",)),
        **dict.fromkeys(("pipeline_parallel_size", "pp"), ("pp_size",)),
        **dict.fromkeys(("expert_parallel_size", "ep"), ("ep_size",)),
        **dict.fromkeys(("max_model_len", "max_seq_len"), ("context_length",)),
        "gpu_memory_utilization": ("mem_fraction_static",),
        "max_num_seqs": ("max_running_requests",),
        "max_num_batched_tokens": ("max_prefill_tokens",),
        "enforce_eager": ("disable_cuda_graph",),
        "block_size": ("page_size",),
    }

    context_length: PositiveInt = UNSET
    """Longest sample. Default: the model's longest."""
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = UNSET
    """Default: bfloat16, on CPUs float32."""
    kv_cache_dtype: Literal["auto", "fp8_e5m2", "fp8_e4m3", "bfloat16"] = UNSET
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] = UNSET
    """Part of a GPU's free memory for weights and cache."""
    max_running_requests: PositiveInt = UNSET
    max_total_tokens: PositiveInt = UNSET
    """Tokens in the cache. Default on CPUs: 16384."""
    chunked_prefill_size: Annotated[int, Field(ge=-1)] = UNSET
    max_prefill_tokens: PositiveInt = UNSET
    page_size: PositiveInt = UNSET
    """Default: 1, or 64 with ``quantization`` and a cache in fp8."""
    disable_radix_cache: bool = UNSET
    disable_overlap_schedule: bool = UNSET
    tp_size: PositiveInt = UNSET
    dcp_size: PositiveInt = UNSET
    pp_size: PositiveInt = UNSET
    dp_size: PositiveInt = UNSET
    """Above 1 with ``enable_dp_attention``, or without ``weights_from``."""
    attn_cp_size: PositiveInt = UNSET
    moe_dp_size: PositiveInt = UNSET
    enable_dp_attention: bool = UNSET
    sleep_on_idle: bool = UNSET
    log_level: Literal["critical", "error", "warning", "info", "debug"] = UNSET
    """Default: warning."""
    attention_backend: str = UNSET
    sampling_backend: str = UNSET
    """Default: ``fused``, dagrl's sampler, which computes a token and its log-prob in one pass over the vocabulary."""
    cuda_graph_backend_decode: _Graphs = UNSET
    cuda_graph_backend_prefill: _Graphs = UNSET
    """Default: disabled."""
    cuda_graph_max_bs_decode: PositiveInt = UNSET
    """Default: ``max_running_requests``, at most 512."""
    cuda_graph_bs_decode: list[PositiveInt] = UNSET
    disable_cuda_graph: bool = UNSET
    enforce_disable_flashinfer_allreduce_fusion: bool = UNSET
    ep_size: PositiveInt = UNSET
    enable_deterministic_inference: bool = UNSET
    """Draw each sample by its seed."""
    enable_return_routed_experts: bool = UNSET
    """Set by dagrl if a trainer replays routes."""

    refused: ClassVar = {
        **dict.fromkeys(
            ("model_path", "revision", "tokenizer_path", "json_model_override_args"),
            removal("follows from `model`"),
        ),
        **dict.fromkeys(
            ("nnodes", "node_rank", "dist_init_addr", "nccl_port", "base_gpu_id", "gpu_id_step", "device"),
            removal("follows from the group"),
        ),
        "random_seed": removal("follows from `run.seed`"),
        **dict.fromkeys(
            ("sampling_defaults", "preferred_sampling_params"), removal("follows from `sampling` of the rollout")
        ),
        "skip_tokenizer_init": removal("is true: tokens go in and out by their ids"),
        **dict.fromkeys(("host", "port"), removal("is for the HTTP server, which dagrl does not start")),
        **dict.fromkeys(("custom_weight_loader", "weight_version"), removal("belongs to dagrl's weight sync")),
        **dict.fromkeys(
            ("enable_memory_saver", "enable_weights_cpu_backup", "enable_draft_weights_cpu_backup"),
            removal("follows from `sleep` of the engine"),
        ),
    }
