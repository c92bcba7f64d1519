"""What leaves the device while nobody uses it, and comes back to the bit: weights, gradients and the optimizer.

Storages are emptied and filled again, so that everything which looks into them stays as it is: weights are views of the
buffers that are gathered over replicas, and float32 weights are the optimizer's too. Megatron's own offloading moves
the optimizer's tensors elsewhere instead, which would cut float32 weights off from those buffers.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import MegatronModule
from megatron.core.utils import get_model_config

from dagrl.spec.schema import OffloadSpec

_GIB = 2**30
_CHUNK_BYTES = 64 << 20
"""A power of two: torch rounds pinned memory up to one."""
_ALIGNMENT = 256

Storages = dict[int, torch.UntypedStorage]
"""Storages by their address as objects, which stays while their memory comes and goes."""


class HostMemory:
    """Room on the host for the contents of storages, pinned where they are a GPU's; taken once and used again."""

    def __init__(self, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunks: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """What was taken from the host so far."""
        return len(self._chunks) * self._chunk_bytes

    def put(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copy the contents here, over what was put before. On a GPU the copies are queued only."""
        for device, host in self.pieces(map(_bytes_of, storages)):
            host.copy_(device, non_blocking=True)

    def take(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copy back what was put, into storages of the same sizes in the same order. On a GPU queued only."""
        for device, host in self.pieces(map(_bytes_of, storages)):
            device.copy_(host, non_blocking=True)

    def pieces(self, contents: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of `contents`, uint8 [bytes] each, with their places here: they lie end to end, over the chunks."""
        position = 0
        for content in contents:
            done = 0
            while done < len(content):
                chunk, start = divmod(position, self._chunk_bytes)
                length = min(len(content) - done, self._chunk_bytes - start)
                yield content[done : done + length], self._chunk(chunk, content.device)[start : start + length]
                done += length
                position += length
            position += -position % _ALIGNMENT

    def _chunk(self, index: int, device: torch.device) -> torch.Tensor:
        if index == len(self._chunks):
            pinned = device.type == "cuda"
            self._chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=pinned))
        return self._chunks[index]


class Part:
    """Storages on the device that can be away: their contents wait on the host, or are dropped."""

    def __init__(self, storages: Callable[[], Storages], *, keep: bool, rests_away: bool) -> None:
        """`storages` is asked whenever the part leaves. Without `keep` it comes back as zeros. With `rests_away` it
        is away whenever nobody uses it, beginning now.
        """
        self._storages, self._keep, self._rests_away = storages, keep, rests_away
        self._host = HostMemory()
        self._away: list[tuple[torch.UntypedStorage, int]] | None = None
        self._users = 0
        if rests_away:
            self._leave()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within the context the part is on the device."""
        if self._away is not None:
            self._come_back()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0 and self._rests_away:
                self._leave()

    def sleep(self) -> None:
        """Be away until `wake`, used or not."""
        assert self._users == 0, "the part is in use"
        if self._away is None:
            self._leave()

    def wake(self) -> None:
        """Undo `sleep`."""
        if not self._rests_away:
            self._come_back()

    def _leave(self) -> None:
        storages = list(self._storages().values())
        if self._keep:
            self._host.put(storages)
        # Before the memory is given to somebody else.
        _synchronize()
        self._away = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def _come_back(self) -> None:
        assert self._away is not None, "the part is on the device"
        storages = []
        for storage, nbytes in self._away:
            storage.resize_(nbytes)
            storages.append(storage)
        if self._keep:
            self._host.take(storages)
        else:
            for storage in storages:
                _bytes_of(storage).zero_()
        # Before another stream reads it, or the host writes to what it is copied from.
        _synchronize()
        self._away = None


class EngineMemory:
    """The device memory of one rank's model and optimizer: what is there when."""

    def __init__(
        self, chunks: Sequence[MegatronModule], optimizer: MegatronOptimizer | None, offload: OffloadSpec
    ) -> None:
        """`chunks` are wrapped for training where there is an `optimizer`; without one there are weights only.

        What `offload` names leaves at once. ValueError where it cannot.
        """
        self._asleep = False
        self._cannot_leave = _needs_its_addresses(chunks)
        if self._cannot_leave and (offload.param or offload.grad or offload.optimizer):
            raise ValueError(f"offload: {self._cannot_leave}; turn one of the two off")
        self._weights = Part(lambda: weight_storages(chunks), keep=True, rests_away=offload.param)
        self._training: list[Part] = []
        if optimizer is not None:
            self._training = [
                Part(lambda: _gradients(chunks, optimizer), keep=False, rests_away=offload.grad),
                Part(lambda: optimizer_storages(chunks, optimizer), keep=True, rests_away=offload.optimizer),
            ]

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Within the context the weights are there."""
        with self._in_use(self._weights):
            yield

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Within the context weights and gradient buffers are there; the buffers may come as zeros."""
        with self._in_use(self._weights, *self._training[:1]):
            yield

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """Within the context weights, and the optimizer's float32 weights and moments, are there."""
        with self._in_use(self._weights, *self._training[1:]):
            yield

    def sleep(self) -> None:
        """Empty the device of everything. RuntimeError where it is asleep already, or cannot be."""
        self._refuse_asleep()
        if self._cannot_leave:
            raise RuntimeError(f"the engine cannot sleep: {self._cannot_leave}")
        self._asleep = True
        for part in (*self._training, self._weights):
            part.sleep()

    def wake(self) -> None:
        """Bring back what is not away anyway between uses. RuntimeError where it is not asleep."""
        if not self._asleep:
            raise RuntimeError("the engine is awake; wake() comes after sleep()")
        for part in (self._weights, *self._training):
            part.wake()
        self._asleep = False

    @contextmanager
    def _in_use(self, *parts: Part) -> Iterator[None]:
        self._refuse_asleep()
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(part.in_use())
            yield

    def _refuse_asleep(self) -> None:
        if self._asleep:
            raise RuntimeError("the engine sleeps; call wake() before anything else is asked of it")


def weight_storages(chunks: Sequence[torch.nn.Module]) -> Storages:
    """Where the parameters are: their own storages, or buffers that many of them share."""
    return _storages_of(parameter for chunk in chunks for parameter in chunk.parameters())


def gradient_storages(chunks: Sequence[Any]) -> Storages:
    """The gradient buffers of chunks that are wrapped for training, less what weights share with them."""
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    tensors = itertools.chain.from_iterable((buffer.grad_data, *buffer.extra_main_grads) for buffer in buffers)
    return _without(_storages_of(tensors), weight_storages(chunks))


def optimizer_storages(chunks: Sequence[Any], optimizer: MegatronOptimizer) -> Storages:
    """Float32 weights and moments on the device, less what are weights of the model themselves."""
    device = next(chunks[0].parameters()).device.type
    mine = (tensor for tensor in _optimizer_tensors(optimizer) if tensor.device.type == device)
    return _without(_without(_storages_of(mine), weight_storages(chunks)), gradient_storages(chunks))


def _needs_its_addresses(chunks: Sequence[Any]) -> str:
    """Why memory that comes back elsewhere would not do for this model; empty where it does."""
    config = get_model_config(chunks[0])
    if config.cuda_graph_impl != "none":
        return f"transformer.cuda_graph_impl {config.cuda_graph_impl!r} records addresses in device memory"
    if any(chunk.ddp_config.nccl_ub for chunk in chunks if hasattr(chunk, "ddp_config")):
        return "ddp.nccl_ub registers device memory with NCCL"
    if any(type(parameter.data) is not torch.Tensor for chunk in chunks for parameter in chunk.parameters()):
        return "weights kept in fp8 have storages of their own kind"
    return ""


def _gradients(chunks: Sequence[Any], optimizer: MegatronOptimizer) -> Storages:
    # The optimizer keeps gradients of its last step, where it needed them in another precision.
    optimizer.zero_grad()
    return gradient_storages(chunks)


def _optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        # A rank may have nothing to optimize.
        if part.optimizer is None:
            continue
        # Megatron's hybrid optimizer holds some for the GPU and some for the CPU.
        for inner in (part.optimizer, *getattr(part.optimizer, "sub_optimizers", ())):
            for group in inner.param_groups:
                yield from group["params"]
            for state in inner.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _storages_of(tensors: Iterable[torch.Tensor]) -> Storages:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in storages}


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _without(storages: Storages, others: Storages) -> Storages:
    return {address: storage for address, storage in storages.items() if address not in others}


def device_gib_used() -> float:
    """What is taken on this process's GPU, as the driver counts it, by other processes too; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / _GIB


def release_caches() -> None:
    """Give back what torch, megatron and Transformer Engine keep on the device to use again."""
    # Tensors in reference cycles are still there until somebody looks for them.
    gc.collect()
    parallel_state.get_global_memory_buffer().buffer.clear()
    RotaryEmbedding.forward.cache_clear()
    if not torch.cuda.is_available():
        return
    if gemm := sys.modules.get("transformer_engine.pytorch.cpp_extensions.gemm"):
        gemm.get_cublas_workspace.cache_clear()
    if base := sys.modules.get("transformer_engine.pytorch.module.base"):
        base._dummy_wgrads.clear()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
