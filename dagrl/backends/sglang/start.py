"""Starts a machine's share of a server: model folder, arguments, processes."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

from dagrl.backends.serving.client import ServerError
from dagrl.backends.serving.gpu_memory import gpu_memory
from dagrl.backends.serving.model_folder import model_folder
from dagrl.backends.sglang.args import server_arguments
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.backends.sglang.server import ServerProcess
from dagrl.backends.sglang.share import ServerShare
from dagrl.config.schema import ModelSpec
from dagrl.config.schema.engine import SentAdapter
from dagrl.model_files.library_model import load_hf_config

SGLANG_VERSION = "0.5.17"
"""Version that `client.py` and `server.py` support: they use internals of SGLang."""


def start_server(
    model: ModelSpec,
    spec: SglangEngineSpec,
    share: ServerShare,
    *,
    seed: int,
    sleeps: bool,
    adapter: SentAdapter | None = None,
) -> ServerProcess:
    """Start the share's processes and wait until they are ready; the other machines' start at the same time.

    With an `adapter` they have the model's weights, and take adapters instead of weights.

    Raises ValueError for an invalid model or argument, ServerError if the server fails or is not ready in time.
    """
    _check_version()
    # Switches of SGLang without arguments: CUDA graphs whose memory can be released, further machines without an HTTP
    # server, a context longer than the model's positions, whose last tokens are not used, and kernels for fp8 compiled
    # when they are needed instead of for all lengths, which can take 20 minutes on a new machine.
    os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = str(int(sleeps))
    os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    if not share.gpus:
        # SGLang compiles the choice of experts, which takes a C++ compiler and longer than it saves here.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    own_weights = spec.weights_from is None or adapter is not None
    # SGLang reads the folder only while it starts.
    with tempfile.TemporaryDirectory(prefix="dagrl-sglang-") as scratch:
        folder = model_folder(model, Path(scratch), seed=seed, with_weights=own_weights, fp8=spec.taken_fp8)
        arguments = server_arguments(
            spec, share, folder, positions=_positions(model), seed=seed, sleeps=sleeps, adapter=adapter
        )
        return ServerProcess(
            share.name, arguments, share.log_prefix, share.start_timeout_s, circumstances=_memory(spec, share)
        )


def _positions(model: ModelSpec) -> int:
    """Longest context that SGLang derives from the model."""
    from sglang.srt.utils.hf_transformers import get_context_length

    return get_context_length(load_hf_config(model).get_text_config())


def _check_version() -> None:
    remedy = "install it with `uv pip install -r requirements/sglang.txt`"
    if importlib.util.find_spec("sglang") is None:
        raise ServerError(f"SGLang is not installed; {remedy}")
    from sglang import __version__ as installed

    # Post-releases such as 0.5.17.post1 are compatible.
    if not f"{installed}.".startswith(f"{SGLANG_VERSION}."):
        raise ServerError(f"SGLang {installed} is installed, but dagrl needs {SGLANG_VERSION}; {remedy}")


def _memory(spec: SglangEngineSpec, share: ServerShare) -> str:
    """Free memory of the GPUs, for the message: too little is the most common reason for a failed start."""
    memory = gpu_memory(share.gpus)
    if not memory:
        return ""
    fraction = spec.server.get("mem_fraction_static")
    wanted = f", and mem_fraction_static is {fraction:g} of what is free" if fraction is not None else ""
    return f"; before it started, {', '.join(map(str, memory))}{wanted}"
