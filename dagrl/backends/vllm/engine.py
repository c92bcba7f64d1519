"""A generator on a vLLM server. `server.py` has the processes, `client.py` the requests."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import ClassVar

from dagrl.backends.serving.engine import ServerEngine
from dagrl.backends.serving.model_folder import model_folder
from dagrl.backends.serving.share import ServerShare
from dagrl.backends.vllm.adapters import least_rank
from dagrl.backends.vllm.client import Client
from dagrl.backends.vllm.section import CPU_CACHE_GIB, VllmEngineSpec, utilization_of
from dagrl.backends.vllm.server import VllmServer
from dagrl.config.residency import Residency
from dagrl.config.schema import ModelSpec
from dagrl.model_files.images import image_settings

_LOGPROBS = 20
"""vLLM's own ``max_logprobs``."""
_SCORED_TOKENS = 2048
"""Tokens of a batch whose log-probs are computed: their logits in float32, and log-probs, take 2.5 GB for Qwen3."""
_STREAM_INTERVAL = 16
"""Tokens of a request that arrive together: with hundreds of requests, a message per token keeps Python busy."""


class VllmEngine(ServerEngine[VllmEngineSpec]):
    """One vLLM server."""

    kinds: ClassVar = {
        Residency.AWAKE: frozenset[str](),
        Residency.WEIGHTS: frozenset({"kv_cache"}),
        Residency.ASLEEP: frozenset({"kv_cache", "weights"}),
    }
    more_room = "raise gpu_memory_utilization or max_model_len, use more GPUs per server (tensor_parallel_size)"

    def _start(self, model: ModelSpec, spec: VllmEngineSpec, share: ServerShare) -> tuple[VllmServer, Client]:
        _set_environment(spec, share)
        self._scratch = tempfile.TemporaryDirectory(prefix="dagrl-vllm-")
        own, vision = spec.weights_from is None or share.adapter is not None, image_settings(model)
        folder = model_folder(
            model, Path(self._scratch.name), seed=share.ranks.seed, with_weights=own, fp8=spec.taken_fp8
        )
        arguments = engine_arguments(spec, share, folder)
        if vision is not None:
            # Its processor of images needs the tokenizer, which may have no token for videos.
            arguments |= {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"video": 0}}
        log = share.log_prefix.with_name(f"{share.log_prefix.name}.log")
        server = VllmServer(share.name, arguments, log, share.start_timeout_s)
        if vision is None:
            # The processor is read with the first image.
            self._scratch.cleanup()
        return server, Client(server.engine, keeps_weights=own, adapter=share.adapter, vision=vision)

    def close(self) -> None:
        super().close()
        self._scratch.cleanup()


def _set_environment(spec: VllmEngineSpec, share: ServerShare) -> None:
    """Set options for which vLLM has no arguments."""
    if not share.gpus:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CPU_CACHE_GIB))
        # Ray assigns the cores.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # vLLM compiles a function of its sampler, which takes a C++ compiler and longer than it saves here.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    if share.ranks.master_port and spec.attention_copies == 1:
        # vLLM's processes meet there seconds after it has chosen the port. vLLM's default choice could be taken by an
        # outgoing connection in between. Copies of attention meet at several ports.
        os.environ["VLLM_PORT"] = str(share.ranks.master_port)
    if spec.taken_fp8 is not None:
        # DeepGEMM's kernels round scales to powers of two when they load; an update in place would not.
        os.environ["VLLM_USE_DEEP_GEMM"] = "0"


def engine_arguments(spec: VllmEngineSpec, share: ServerShare, folder: Path) -> dict[str, object]:
    on_gpus, adapter = bool(share.gpus), share.adapter
    defaults: dict[str, object] = {"dtype": "bfloat16"} if on_gpus else {"dtype": "float32", "enforce_eager": True}
    if on_gpus:
        defaults["gpu_memory_utilization"] = utilization_of(spec, sleeps=share.sleeps)
    if adapter is not None:
        defaults |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": least_rank(adapter.rank)}
    if spec.taken_fp8 is not None:
        # Other kernels change the layout of expert weights when they load.
        defaults["moe_backend"] = "triton"
    if share.scored_top_k is not None:
        defaults["max_logprobs"] = max(share.scored_top_k, _LOGPROBS)
        if on_gpus:
            # vLLM holds the logits of all tokens of a batch in memory, without reserving room for them.
            defaults["max_num_batched_tokens"] = _SCORED_TOKENS
    trained = spec.weights_from is not None and adapter is None
    return (
        defaults
        | {"stream_interval": _STREAM_INTERVAL}
        | spec.server
        | {
            "model": str(folder),
            "load_format": "dummy" if trained else spec.server.get("load_format", "auto"),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": "dagrl.backends.vllm.extension.Extension",
            "enable_sleep_mode": on_gpus and share.sleeps,
            # Within a worker of Ray, vLLM would start its processes through Ray.
            "distributed_executor_backend": "mp" if spec.gpus_per_server > 1 else "uni",
            "disable_log_stats": True,
            "seed": share.seed,
        }
    )
