"""Starts a machine's share of a server: the model's folder, the arguments, the processes."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

from dagrl.backends.model_source import load_hf_config
from dagrl.backends.sglang.args import server_arguments
from dagrl.backends.sglang.gpu_memory import gpu_memory
from dagrl.backends.sglang.model_folder import model_folder
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.backends.sglang.server import ServerError, ServerProcess
from dagrl.backends.sglang.share import ServerShare
from dagrl.config.schema import ModelSpec

SGLANG_VERSION = "0.5.17"
"""What `client.py` and `server.py` are written for: they use much that SGLang does not promise to keep."""


def start_server(
    model: ModelSpec, spec: SglangEngineSpec, share: ServerShare, *, seed: int, sleeps: bool
) -> ServerProcess:
    """The share's processes, ready; together with the other machines', which start at the same time.

    ValueError where the model or an argument makes no sense, ServerError where the server fails or is not ready in
    time.
    """
    _check_version()
    # SGLang's own switches, which have no arguments: graphs whose memory can be given back, the processes of a further
    # machine without a server of their own, and a context that ends behind the model's positions, which nobody uses.
    os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = str(int(sleeps))
    os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    # SGLang reads the folder while it starts, and never again.
    with tempfile.TemporaryDirectory(prefix="dagrl-sglang-") as scratch:
        folder = model_folder(model, Path(scratch), seed=seed, with_weights=spec.weights_from is None)
        arguments = server_arguments(spec, share, folder, positions=_positions(model), seed=seed, sleeps=sleeps)
        return ServerProcess(
            share.name, arguments, share.log_prefix, share.start_timeout_s, circumstances=_memory(spec, share)
        )


def _positions(model: ModelSpec) -> int:
    """How long SGLang would let a context be."""
    from sglang.srt.utils.hf_transformers import get_context_length

    return get_context_length(load_hf_config(model).get_text_config())


def _check_version() -> None:
    remedy = "install it with `uv pip install -r requirements/sglang.txt`"
    if importlib.util.find_spec("sglang") is None:
        raise ServerError(f"SGLang is not installed; {remedy}")
    from sglang import __version__ as installed

    # 0.5.17.post1 and the like are the same to us.
    if not f"{installed}.".startswith(f"{SGLANG_VERSION}."):
        raise ServerError(f"SGLang {installed} is installed, and dagrl speaks to {SGLANG_VERSION}; {remedy}")


def _memory(spec: SglangEngineSpec, share: ServerShare) -> str:
    """What GPUs have left now: the commonest reason for a start to fail."""
    memory = gpu_memory(share.gpus)
    if not memory:
        return ""
    fraction = spec.server.get("mem_fraction_static")
    wanted = f", and mem_fraction_static is {fraction:g} of what is free" if fraction is not None else ""
    return f"; before it started, {', '.join(map(str, memory))}{wanted}"
