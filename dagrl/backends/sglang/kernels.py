"""Compiles SGLang's kernels in parallel while a server starts.

SGLang compiles a kernel at its first call: on a machine whose cache has none of them, one after another, about a minute
before the first CUDA graph. For SGLang 0.5.17, whose functions have no public names. SGLang itself compiles the
remaining kernels, and waits for kernels that are being compiled here.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from sglang.srt.server_args import ServerArgs

_ROPE_HEADS = (64, 128, 256, 512)
"""Sizes of attention heads for which SGLang has the fused kernel of rotary embeddings."""


def compile_ahead(server_args: ServerArgs) -> None:
    """Start compiling the kernels of a model on threads; `server_args` are SGLang's. Returns at once."""
    import torch

    if not torch.cuda.is_available():
        return
    import tvm_ffi.cpp  # noqa: F401 (threads should not import)
    from sglang.kernels.jit.utils import get_jit_cuda_arch

    config = json.loads((Path(server_args.model_path) / "config.json").read_text())
    # SGLang sets and removes this around each compilation, so concurrent threads would interfere.
    os.environ["TVM_FFI_CUDA_ARCH_LIST"] = get_jit_cuda_arch().target_name
    ranks = server_args.tp_size // (server_args.dp_size if server_args.enable_dp_attention else 1)
    dtype = getattr(torch, server_args.dtype, torch.bfloat16)
    needed = kernels(
        config.get("text_config", config),
        ranks=ranks,
        dtype=dtype,
        cache_bytes=1 if server_args.kv_cache_dtype.startswith("fp8") else 2,
    )
    if ranks > 1 and not server_args.disable_custom_all_reduce:
        needed += all_reduce_kernels(ranks, dtype)
    if (config.get("quantization_config") or {}).get("quant_method") == "fp8":
        needed += fp8_kernels(dtype)
    for kernel in needed:
        threading.Thread(target=_compile, args=(kernel,), daemon=True).start()


def kernels(config: Mapping[str, Any], *, ranks: int, dtype: torch.dtype, cache_bytes: int) -> list[partial[object]]:
    """Calls that compile the kernels of a transformer with rotary embeddings, or load them, by its Hugging Face config.

    `ranks` share the heads of attention; an element of the cache has `cache_bytes`. Empty for latent attention, whose
    kernels differ.
    """
    import torch
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module
    from sglang.kernels.ops.layernorm.norm import _jit_qknorm_module

    heads = config.get("num_attention_heads")
    if not heads or "kv_lora_rank" in config:
        return []
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    row_bytes = max(1, (config.get("num_key_value_heads") or heads) // ranks) * head_size * cache_bytes
    needed: list[partial[object]] = [
        partial(activation_module, dtype),
        partial(_jit_clamp_position_module, torch.int64),
        partial(_jit_kvcache_module, row_bytes, row_bytes),
    ]
    if head_size in _ROPE_HEADS:
        rotated = int(head_size * (config.get("partial_rotary_factor") or 1))
        needed.append(partial(_jit_fused_rope_module, True, rotated, dtype, dtype))
        # Not every model normalizes queries and keys; an unnecessary compilation takes no longer than the others.
        needed.append(partial(_jit_qknorm_module, head_size, dtype))
    return needed


def all_reduce_kernels(ranks: int, dtype: torch.dtype) -> list[partial[object]]:
    """The same for sums between ranks of a machine."""
    from sglang.kernels.jit.utils import load_jit
    from sglang.kernels.ops.communication.all_reduce import get_all_reduce_module

    # SGLang's functions for the last two also register classes, which it does itself.
    return [
        partial(get_all_reduce_module, dtype, ranks),
        partial(
            load_jit,
            "communicator",
            cuda_files=["distributed/communicator.cuh"],
            cuda_wrappers=[("register_once", "register_communicator")],
        ),
        partial(
            load_jit,
            "cuda_ipc",
            extra_ldflags=["-lcuda"],
            cuda_files=["distributed/ipc.cuh"],
            cuda_wrappers=[("register_once", "register_ipc_manager")],
        ),
    ]


def fp8_kernels(dtype: torch.dtype) -> list[partial[object]]:
    """The same for inputs of linear layers in fp8 with scales of blocks of 128 values."""
    import torch
    from sglang.kernels.jit.utils import is_arch_support_pdl
    from sglang.kernels.ops.quantization.per_token_group_quant import _jit_module

    layout = {"scale_ue8m0": False, "row_major": False, "aligned": True}
    rest = {"fuse_silu_and_mul": False, "masked_layout": False, "use_pdl": is_arch_support_pdl()}
    return [partial(_jit_module, dtype, torch.float8_e4m3fn, 128, **layout, **rest)]


def _compile(kernel: partial[object]) -> None:
    # SGLang compiles it again when necessary, and reports the error.
    with contextlib.suppress(Exception):
        kernel()
