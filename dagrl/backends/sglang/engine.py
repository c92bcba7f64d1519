"""A generator on a SGLang server. `server.py` has the processes, `client.py` the requests."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import ClassVar

from dagrl.backends.serving.engine import ServerEngine
from dagrl.backends.serving.gpu_memory import gpu_memory
from dagrl.backends.serving.model_folder import model_folder
from dagrl.backends.serving.section import ROUTED_EXPERTS
from dagrl.backends.serving.share import ServerShare
from dagrl.backends.sglang.args import server_arguments
from dagrl.backends.sglang.client import Client
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.backends.sglang.server import SglangServer
from dagrl.config.residency import Residency
from dagrl.config.schema import ModelSpec
from dagrl.model_files.images import image_settings
from dagrl.model_files.library_model import load_hf_config


class SglangEngine(ServerEngine[SglangEngineSpec]):
    """One SGLang server."""

    kinds: ClassVar = {
        Residency.AWAKE: frozenset[str](),
        Residency.WEIGHTS: frozenset({"kv_cache", "cuda_graph"}),
        Residency.ASLEEP: frozenset({"kv_cache", "cuda_graph", "weights"}),
    }
    more_room = "raise mem_fraction_static or max_total_tokens, use more GPUs per server (tp_size)"

    def _start(self, model: ModelSpec, spec: SglangEngineSpec, share: ServerShare) -> tuple[SglangServer, Client]:
        routing = _routing(model) if spec.server.get(ROUTED_EXPERTS) else None
        server = start_server(model, spec, share)
        return server, Client(server.engine, routing, share.adapter, image_settings(model))


def start_server(model: ModelSpec, spec: SglangEngineSpec, share: ServerShare) -> SglangServer:
    """Start the share's processes and wait until they are ready; the other machines' start at the same time.

    Raises ValueError for an invalid model or argument, ServerError if the server fails or is not ready in time.
    """
    # Switches of SGLang without arguments: CUDA graphs whose memory can be released, further machines without an HTTP
    # server, a context longer than the model's positions, whose last tokens are not used, and kernels for fp8 compiled
    # when they are needed instead of for all lengths, which can take 20 minutes on a new machine.
    os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = str(int(share.sleeps))
    os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    if not share.gpus:
        # SGLang compiles the choice of experts, which takes a C++ compiler and longer than it saves here.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    own_weights = spec.weights_from is None or share.adapter is not None
    # SGLang reads the folder only while it starts.
    with tempfile.TemporaryDirectory(prefix="dagrl-sglang-") as scratch:
        folder = model_folder(model, Path(scratch), seed=share.ranks.seed, with_weights=own_weights, fp8=spec.taken_fp8)
        arguments = server_arguments(spec, share, folder, positions=_positions(model))
        return SglangServer(
            share.name, arguments, share.log_prefix, share.start_timeout_s, circumstances=_memory(spec, share)
        )


def _positions(model: ModelSpec) -> int:
    """Longest context that SGLang derives from the model."""
    from sglang.srt.utils.hf_transformers import get_context_length

    return get_context_length(load_hf_config(model).get_text_config())


def _routing(model: ModelSpec) -> tuple[int, int]:
    """Number of layers, and of experts per token."""
    config = load_hf_config(model).get_text_config()
    return config.num_hidden_layers, config.num_experts_per_tok


def _memory(spec: SglangEngineSpec, share: ServerShare) -> str:
    """Free memory of the GPUs, for the message: too little is the most common reason for a failed start."""
    memory = gpu_memory(share.gpus)
    if not memory:
        return ""
    fraction = spec.server.get("mem_fraction_static")
    wanted = f", and mem_fraction_static is {fraction:g} of what is free" if fraction is not None else ""
    return f"; before it started, {', '.join(map(str, memory))}{wanted}"
