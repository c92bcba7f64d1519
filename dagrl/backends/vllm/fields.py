"""Fields of vLLM's AsyncEngineArgs that are tested with dagrl, and fields that dagrl sets itself.

Checked against vLLM 0.26.0. Other fields go under ``extra:`` of an engine.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dagrl.config.errors import removal
from dagrl.config.schema.library_fields import UNSET, LibraryFields
from dagrl.config.schema.section import PositiveInt


class VllmFields(LibraryFields):
    """Fields of vLLM's engine arguments that are tested with dagrl; others go under ``extra``."""

    library_class: ClassVar = ("vllm", "engine/arg_utils.py", "AsyncEngineArgs")
    called_elsewhere: ClassVar = {
        **dict.fromkeys(("tp_size", "tensor_model_parallel_size", "tp"), ("tensor_parallel_size",)),
        **dict.fromkeys(("dp_size", "dp"), ("data_parallel_size",)),
        **dict.fromkeys(("context_length", "max_seq_len"), ("max_model_len",)),
        **dict.fromkeys(("mem_fraction_static", "gpu_memory_fraction"), ("gpu_memory_utilization",)),
        "max_running_requests": ("max_num_seqs",),
        "page_size": ("block_size",),
        "disable_cuda_graph": ("enforce_eager",),
    }

    max_model_len: PositiveInt = UNSET
    """Longest sample. Default: the model's longest."""
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = UNSET
    """Default: bfloat16, on CPUs float32."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"] = UNSET
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = UNSET
    """Share of a GPU's memory for weights, activations, graphs and cache. Default: vLLM's, 0.8 for a server that
    sleeps."""
    kv_cache_memory_bytes: Annotated[int, Field(gt=0)] = UNSET
    """Bytes of a GPU's cache. Default: the rest of `gpu_memory_utilization`."""
    tensor_parallel_size: PositiveInt = UNSET
    data_parallel_size: PositiveInt = UNSET
    """Copies of attention in a server of a mixture of experts, each on ``tensor_parallel_size`` GPUs."""
    enable_expert_parallel: bool = UNSET
    """Distribute experts over the GPUs of a server instead of splitting each."""
    enable_return_routed_experts: bool = UNSET
    """Set by dagrl if a trainer replays routes."""
    max_num_seqs: PositiveInt = UNSET
    max_num_batched_tokens: PositiveInt = UNSET
    block_size: PositiveInt = UNSET
    num_gpu_blocks_override: PositiveInt = UNSET
    enforce_eager: bool = UNSET
    """Decode without CUDA graphs and compilation. Default on CPUs: true."""
    enable_prefix_caching: bool = UNSET
    enable_chunked_prefill: bool = UNSET
    stream_interval: PositiveInt = UNSET
    """Tokens of a request that arrive together. Default: 16."""

    refused: ClassVar = {
        **dict.fromkeys(("model", "revision", "tokenizer", "hf_overrides"), removal("follows from `model`")),
        **dict.fromkeys(
            (
                "nnodes",
                "node_rank",
                "master_addr",
                "master_port",
                "distributed_executor_backend",
                "data_parallel_backend",
                "data_parallel_size_local",
            ),
            removal("follows from the group"),
        ),
        "pipeline_parallel_size": "servers have no pipeline stages; raise tensor_parallel_size instead",
        "seed": removal("follows from `run.seed`"),
        "generation_config": removal("follows from `sampling` of the rollout"),
        "logprobs_mode": removal("is processed_logprobs: a log-prob belongs to the distribution that was sampled"),
        "skip_tokenizer_init": removal("is true: tokens go in and out by their ids"),
        **dict.fromkeys(("worker_extension_cls", "weight_transfer_config"), removal("belongs to dagrl's weight sync")),
        "enable_sleep_mode": removal("follows from `sleep` of the engine"),
    }
