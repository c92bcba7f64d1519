"""Replaces CUDA functions that Megatron needs, on a machine without CUDA: each patch with its reason.

The patches change torch and Megatron for the whole process, so they belong in an engine's worker process.
`dagrl.backends.megatron.engine` installs them before any of its modules imports Megatron. With CUDA nothing is changed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import types
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from dagrl.backends.megatron.engine.quiet import drop_records
from dagrl.imports import without_packages

_CPU = torch.device("cpu")
_CONSTRUCTORS = (
    *("arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros"),
    *("empty_like", "full_like", "ones_like", "zeros_like"),
)
_installed = False


def install() -> None:
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    _import_no_compiler()
    _take_cuda_for_the_cpu()
    _make_streams_do_nothing()
    # Megatron is imported from here on, so the patches above must come first.
    _import_megatron()
    _use_the_cpus_generator_and_adam()
    _rotate_packs_at_once()
    _exchange_uneven_parts()
    _recompute_without_extensions()


def _import_no_compiler() -> None:
    # Megatron's ``jit_fuser`` is torch.compile, which would run a C++ compiler for minutes. Torch reads this variable
    # when functions are compiled.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # To exclude these methods from compilation, torch imports its compiler, which takes seconds.
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        setattr(torch.optim.Optimizer, name, inspect.unwrap(getattr(torch.optim.Optimizer, name)))


def _take_cuda_for_the_cpu() -> None:
    """Megatron makes tensors with ``device="cuda"``, moves them by ``.cuda()``, sorts them by ``tensor.type()``."""
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    # torch's `with torch.device(...)` recognises constructors by a set of functions that it collects at first use. It
    # must have the originals: with ours, transformers 5 leaves rotary buffers uninitialised.
    from torch.utils._device import _device_constructors

    _device_constructors()
    for name in _CONSTRUCTORS:
        setattr(torch, name, _on_the_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    original = torch.Tensor.type

    def read_as_cuda(
        self: torch.Tensor, dtype: torch.dtype | str | None = None, *args: bool, **kwargs: bool
    ) -> torch.Tensor | str:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = read_as_cuda  # type: ignore[method-assign, assignment]


def _on_the_cpu(construct: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(construct)
    def wrapper(*args: object, **kwargs: object) -> torch.Tensor:
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = _CPU
        # Pinned memory needs a driver.
        kwargs.pop("pin_memory", None)
        return construct(*args, **kwargs)

    return wrapper


class _NothingToWaitFor:
    """A stream or an event on a device where operations are synchronous."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def record(self, *args: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *args: object) -> None: ...
    def wait_event(self, *args: object) -> None: ...
    def wait_stream(self, *args: object) -> None: ...

    def record_event(self, event: _NothingToWaitFor | None = None) -> _NothingToWaitFor:
        return event or _NothingToWaitFor()

    def query(self) -> bool:
        return True


def _make_streams_do_nothing() -> None:
    """CUDA streams and events order gradient reduction and checkpoints."""
    stream = _NothingToWaitFor()
    torch.cuda.Stream = torch.cuda.Event = _NothingToWaitFor  # type: ignore[misc, assignment]
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args: stream  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *args: None
    torch.Tensor.record_stream = lambda self, s: None  # type: ignore[method-assign]


def _import_megatron() -> None:
    """Import Megatron without kernels of inference, torch's compiler and trackers, which takes seconds."""
    compiler, torch.compile = torch.compile, _uncompiled  # type: ignore[assignment]
    try:
        with without_packages("flashinfer", "flash_attn", "wandb", "tensorboard"):
            import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
    finally:
        torch.compile = compiler


def _uncompiled(function: Callable[..., object] | None = None, **_: object) -> Callable[..., object]:
    """A decorator, with arguments or without, that changes nothing."""
    return function if function is not None else _uncompiled


def _use_the_cpus_generator_and_adam() -> None:
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random

    from dagrl.backends.megatron.engine.cpu.adam import FusedAdam

    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda *args: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *args: torch.set_rng_state(state)
    # Initialisation and dropout fork the device's generator through Megatron's tracker.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # The tracker warns if the CPU's generator changes within a fork of the device's: here they are the same.
    drop_records(random.__name__, "CPU RNG state changed")
    # With torch's AdamW the distributed optimizer cannot load a state into a new optimizer.
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


def _rotate_packs_at_once() -> None:
    """Megatron rotates packed sequences one by one, in place; the backward pass copies the whole pack for each."""
    from megatron.core.models.common.embeddings import rope_utils

    one_by_one = rope_utils._apply_rotary_pos_emb_thd

    @functools.wraps(one_by_one)
    def rotate(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        *args: object,
        cp_group: dist.ProcessGroup,
        **kwargs: object,
    ) -> torch.Tensor:
        positions = _positions(tuple(cu_seqlens.tolist()), cp_group.rank(), cp_group.size())
        rotated = rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs[positions], *args, **kwargs)
        return rotated.squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = rotate


@functools.lru_cache(maxsize=64)
def _positions(bounds: tuple[int, ...], rank: int, size: int) -> torch.Tensor:
    """Position within its sequence of each token of a context-parallel rank, int64 [tokens]."""
    from dagrl.backends.megatron.engine.context_parallel import zigzag_index

    starts, lengths = np.array(bounds[:-1]), np.diff(bounds)
    return torch.from_numpy(zigzag_index(lengths, rank, size) - starts.repeat(lengths // size))


def _exchange_uneven_parts() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    # The all-to-all of experts takes its sizes as numbers; Megatron converts only tensors on a GPU.
    def convert(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = convert
    gather = dist.all_gather

    # Expert tensor parallelism gathers as many tokens as each rank received; gloo requires equal parts.
    @functools.wraps(gather)
    def gather_any(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        if all(part.shape == tensor_list[0].shape for part in tensor_list):
            return gather(tensor_list, tensor, group=group, async_op=async_op)
        assert not async_op, "uneven parts are gathered synchronously"
        for source, part in enumerate(tensor_list):
            if source == dist.get_rank(group):
                part.copy_(tensor)
            dist.broadcast(part, group=group, group_src=source)
        return None

    dist.all_gather = gather_any


def _recompute_without_extensions() -> None:
    from megatron.core.tensor_parallel import random

    # Recomputation queries Transformer Engine for its fp8 state, and restores any result but None.
    random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = random.fp8_autocast = lambda **kwargs: contextlib.nullcontext()

    # A recomputed output is restored by a C++ extension, compiled at first use, without autograd's notice.
    def put_back(output: torch.Tensor, again: torch.Tensor) -> None:
        given_up, computed = output.untyped_storage(), again.untyped_storage()
        given_up.resize_(computed.nbytes())
        given_up.copy_(computed)

    random._get_share_storage = lambda: put_back
