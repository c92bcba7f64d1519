"""Offloads weights, gradients and the optimizer while they are not used, and restores them bit for bit.

Works on storages (`device_memory`), because they are shared: weights are views of buffers that are gathered over
replicas, and float32 weights are the optimizer's too. Megatron's own offloading moves the optimizer's tensors instead,
which would separate float32 weights from those buffers.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import MegatronModule
from megatron.core.utils import get_model_config

from dagrl.backends.megatron.section import OffloadSpec
from dagrl.backends.runtime.device_memory import OffloadableStorages, Storages, storages_of
from dagrl.config.residency import Residency

_LONG_LOOK_S = 0.05
_STATES = {Residency.ASLEEP: "asleep", Residency.WEIGHTS: "down to its weights", Residency.AWAKE: "awake"}


class EngineOffloader:
    """Controls which memory of one rank's model and optimizer is on the device."""

    def __init__(
        self,
        chunks: Sequence[MegatronModule],
        optimizer: MegatronOptimizer | None,
        offload: OffloadSpec,
        *,
        sends_trained: bool = False,
        further: Sequence[torch.Tensor] = (),
    ) -> None:
        """`chunks` are wrapped for training if there is an `optimizer`; without one there are only weights.

        `further` are frozen weights of another model. `sends_trained`: a sync needs the trained parameters alone.
        Offloads what `offload` names at once. ValueError if it cannot be offloaded.
        """
        self._residency = Residency.AWAKE
        self.rests_away = offload.param or offload.optimizer
        """Whether contents that are kept leave the device after each use."""
        self._cannot_leave = _needs_its_addresses(chunks)
        if self._cannot_leave and (offload.param or offload.grad or offload.optimizer):
            raise ValueError(f"offload: {self._cannot_leave}; turn one of the two off")

        def frozen() -> Storages:
            weights = weight_storages(chunks) | storages_of(further)
            return _without(weights, trained_storages(chunks) if sends_trained else {})

        def sent() -> Storages:
            return trained_storages(chunks) if sends_trained else {}

        self._weights = OffloadableStorages(frozen, keep=True, rests_away=offload.param)
        self._sent = OffloadableStorages(sent, keep=True, rests_away=False)
        self._sends_trained = sends_trained
        self._training: list[OffloadableStorages] = []
        if optimizer is not None:
            self._training = [
                OffloadableStorages(lambda: _gradients(chunks, optimizer), keep=False, rests_away=offload.grad),
                OffloadableStorages(
                    lambda: optimizer_storages(chunks, optimizer), keep=True, rests_away=offload.optimizer
                ),
            ]

    @property
    def residency(self) -> Residency:
        return self._residency

    def weights(self) -> AbstractContextManager[None]:
        """Context with the weights on the device. Such contexts raise RuntimeError for an engine that is not awake."""
        return self._in_use(self._weights, self._sent)

    def sent(self) -> AbstractContextManager[None]:
        """Context with the parameters of a sync on the device."""
        parts = [self._sent] if self._sends_trained else [self._weights]
        return self._in_use(*parts, least=Residency.WEIGHTS)

    def gradients(self) -> AbstractContextManager[None]:
        """Context with weights and gradient buffers on the device; the buffers may be zeroed."""
        return self._in_use(self._weights, self._sent, *self._training[:1])

    def optimizer(self) -> AbstractContextManager[None]:
        """Context with weights, the optimizer's float32 weights and moments on the device."""
        return self._in_use(self._weights, self._sent, *self._training[1:])

    def sleep(self, residency: Residency) -> None:
        """Release the device down to `residency`. Raises RuntimeError if it is there already, or cannot be."""
        if residency >= self._residency:
            raise RuntimeError(f"the engine is {_STATES[self._residency]} already; wake() comes before another sleep()")
        if self._cannot_leave:
            raise RuntimeError(f"the engine cannot sleep: {self._cannot_leave}")
        leaving = self._between(residency, self._residency)
        self._residency = residency
        for part in leaving:
            part.sleep()

    def wake(self, residency: Residency) -> None:
        """Restore the contents that stay on the device between uses. Raises RuntimeError if it is there already.

        Copies to a GPU overlap computation; the optimizer, which is needed last, comes last.
        """
        if residency <= self._residency:
            raise RuntimeError(f"the engine is {_STATES[self._residency]} already; wake() comes after sleep()")
        for part in reversed(self._between(self._residency, residency)):
            part.wake(in_background=True)
        self._residency = residency

    def _between(self, lower: Residency, upper: Residency) -> list[OffloadableStorages]:
        """Contents of the device at `upper` but not at `lower`."""
        levels = {Residency.AWAKE: self._training, Residency.WEIGHTS: [self._weights, self._sent]}
        return [part for level, parts in levels.items() if lower < level <= upper for part in parts]

    @contextmanager
    def _in_use(self, *parts: OffloadableStorages, least: Residency = Residency.AWAKE) -> Iterator[None]:
        if self._residency < least:
            state = _STATES[self._residency]
            raise RuntimeError(f"the engine is {state}; call wake() first")
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(part.in_use())
            yield


def weight_storages(chunks: Sequence[torch.nn.Module]) -> Storages:
    return storages_of(parameter for chunk in chunks for parameter in chunk.parameters())


def trained_storages(chunks: Sequence[torch.nn.Module]) -> Storages:
    trained = (parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad)
    return storages_of(trained)


def gradient_storages(chunks: Sequence[MegatronModule]) -> Storages:
    """Gradient buffers of chunks wrapped for training, except for what weights share with them."""
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    tensors = itertools.chain.from_iterable((buffer.grad_data, *buffer.extra_main_grads) for buffer in buffers)
    return _without(storages_of(tensors), weight_storages(chunks))


def optimizer_storages(chunks: Sequence[MegatronModule], optimizer: MegatronOptimizer) -> Storages:
    """Float32 weights and moments on the device, except for the model's own weights."""
    device = next(chunks[0].parameters()).device.type
    mine = (tensor for tensor in _optimizer_tensors(optimizer) if tensor.device.type == device)
    return _without(_without(storages_of(mine), weight_storages(chunks)), gradient_storages(chunks))


def _needs_its_addresses(chunks: Sequence[MegatronModule]) -> str:
    """The reason why this model's memory must keep its addresses; empty if it need not."""
    config = get_model_config(chunks[0])
    if config.cuda_graph_impl != "none":
        return f"transformer.cuda_graph_impl {config.cuda_graph_impl!r} records addresses in device memory"
    if any(chunk.ddp_config.nccl_ub for chunk in chunks if hasattr(chunk, "ddp_config")):
        return "ddp.nccl_ub registers device memory with NCCL"
    if any(type(parameter.data) is not torch.Tensor for chunk in chunks for parameter in chunk.parameters()):
        return "weights kept in fp8 have storages of their own kind"
    return ""


def _gradients(chunks: Sequence[MegatronModule], optimizer: MegatronOptimizer) -> Storages:
    # The optimizer keeps gradients of its last step if it converted their precision.
    optimizer.zero_grad()
    return gradient_storages(chunks)


def _optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        # A rank may have no parameters to optimize.
        if part.optimizer is None:
            continue
        # Megatron's hybrid optimizer holds some for the GPU and some for the CPU.
        for inner in (part.optimizer, *getattr(part.optimizer, "sub_optimizers", ())):
            for group in inner.param_groups:
                yield from group["params"]
            for state in inner.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _without(storages: Storages, others: Storages) -> Storages:
    return {address: storage for address, storage in storages.items() if address not in others}


def release_caches() -> None:
    """Free the caches of torch, Megatron and Transformer Engine on the device."""
    # Tensors in reference cycles stay until a collection.
    begun = time.perf_counter()
    gc.collect()
    if time.perf_counter() - begun > _LONG_LOOK_S:
        # Most objects were created by the first steps and stay, so later collections can skip them.
        gc.freeze()
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
