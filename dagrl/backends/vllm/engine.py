"""A generator on a vLLM server. `server.py` has the processes, `client.py` the requests."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from dagrl.backends.backend import RankContext
from dagrl.backends.serving.client import ServerError
from dagrl.backends.serving.engine import ServerEngine
from dagrl.backends.serving.model_folder import model_folder
from dagrl.backends.vllm.adapters import least_rank
from dagrl.backends.vllm.client import Client
from dagrl.backends.vllm.section import CPU_CACHE_GIB, VLLM_VERSION, VllmEngineSpec, utilization_of
from dagrl.backends.vllm.server import VllmServer
from dagrl.config.residency import Residency
from dagrl.config.schema import ModelSpec
from dagrl.config.schema.engine import SentAdapter
from dagrl.model_files.end_tokens import end_tokens
from dagrl.model_files.images import image_settings
from dagrl.model_files.tokenizer import load_tokenizer

_STREAM_INTERVAL = 16
"""Tokens of a request that arrive together: with hundreds of requests, a message per token keeps Python busy."""


class VllmEngine(ServerEngine):
    """One vLLM server."""

    kinds: ClassVar = {
        Residency.AWAKE: frozenset[str](),
        Residency.WEIGHTS: frozenset({"kv_cache"}),
        Residency.ASLEEP: frozenset({"kv_cache", "weights"}),
    }
    more_room = "raise gpu_memory_utilization or max_model_len, use more GPUs per server (tensor_parallel_size)"

    def __init__(
        self,
        model: ModelSpec,
        spec: VllmEngineSpec,
        ranks: RankContext,
        *,
        name: str,
        gpus: Sequence[str],
        log: Path,
        start_timeout_s: float,
        sleeps: bool,
        adapter: SentAdapter | None = None,
    ) -> None:
        """Start the server. With an `adapter` it has the model's weights, and takes adapters instead of weights.

        Raises ValueError for an invalid model, ServerError if it fails to start.
        """
        _check_version()
        tokenizer = load_tokenizer(model)
        if not gpus:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(CPU_CACHE_GIB))
            # Ray assigns the cores.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            # vLLM compiles a function of its sampler, which takes a C++ compiler and longer than it saves here.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        if ranks.master_port and spec.attention_copies == 1:
            # vLLM's processes meet there seconds after it has chosen the port. By itself it would choose one that an
            # outgoing connection may take in between. Copies of attention meet at several ports.
            os.environ["VLLM_PORT"] = str(ranks.master_port)
        if spec.taken_fp8 is not None:
            # DeepGEMM's kernels round scales to powers of two when they load; an update in place would not.
            os.environ["VLLM_USE_DEEP_GEMM"] = "0"
        self._scratch = tempfile.TemporaryDirectory(prefix="dagrl-vllm-")
        own, vision = spec.weights_from is None or adapter is not None, image_settings(model)
        folder = model_folder(model, Path(self._scratch.name), seed=ranks.seed, with_weights=own, fp8=spec.taken_fp8)
        arguments = engine_arguments(
            spec, folder, name, seed=ranks.seed, on_gpus=bool(gpus), sleeps=sleeps, adapter=adapter
        )
        if vision is not None:
            # Its processor of images needs the tokenizer, which may have no token for videos.
            arguments |= {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"video": 0}}
        server = VllmServer(name, arguments, log, start_timeout_s)
        if vision is None:
            # The processor is read with the first image.
            self._scratch.cleanup()
        client = Client(server.engine, keeps_weights=own, adapter=adapter, vision=vision)
        server.heard = lambda: client.heard
        super().__init__(
            spec,
            server,
            client,
            waves=[spec.gpus_per_server],
            gpus=gpus,
            tokenizer=tokenizer,
            ends=end_tokens(model, tokenizer),
            timeout_s=ranks.timeout_s,
        )

    def close(self) -> None:
        """Stop the server and all its processes."""
        super().close()
        self._scratch.cleanup()


def engine_arguments(
    spec: VllmEngineSpec,
    folder: Path,
    name: str,
    *,
    seed: int,
    on_gpus: bool,
    sleeps: bool,
    adapter: SentAdapter | None = None,
) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs."""
    defaults: dict[str, Any] = {"dtype": "bfloat16"} if on_gpus else {"dtype": "float32", "enforce_eager": True}
    if on_gpus:
        defaults["gpu_memory_utilization"] = utilization_of(spec, sleeps=sleeps)
    if adapter is not None:
        defaults |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": least_rank(adapter.rank)}
    if spec.taken_fp8 is not None:
        # Others lay the weights of experts out anew when they load.
        defaults["moe_backend"] = "triton"
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
            "enable_sleep_mode": on_gpus and sleeps,
            # Within a worker of Ray, vLLM would start its processes through Ray.
            "distributed_executor_backend": "mp" if spec.gpus_per_server > 1 else "uni",
            "disable_log_stats": True,
            # Each server draws differently, in the 31 bits of a seed.
            "seed": int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4]) >> 1,
        }
    )


def _check_version() -> None:
    remedy = "`make vllm` builds an environment with it; name that in `environment:` of the engine"
    if importlib.util.find_spec("vllm") is None:
        raise ServerError(f"vLLM is not installed; {remedy}")
    from importlib.metadata import packages_distributions, version

    installed = version(packages_distributions()["vllm"][0])
    if installed.partition("+")[0] != VLLM_VERSION:
        raise ServerError(f"vLLM {installed} is installed, but dagrl needs {VLLM_VERSION}; {remedy}")
