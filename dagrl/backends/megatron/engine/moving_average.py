"""Other weights of a trained model: its initial ones, as a reference policy, and a moving average, as a teacher."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory

from dagrl.backends.megatron.lora import ADAPTER
from dagrl.backends.megatron.stored.stored_tensors import AVERAGE
from dagrl.backends.runtime.device_memory import HostMemory
from dagrl.backends.runtime.pinned_memory import add_pinned, unpin


class StartWeights:
    """A copy of a model's weights on the host, which can be swapped with the model's own."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = chunks
        # One allocation, because pinned allocations are rounded up to powers of two.
        self._aside = HostMemory()
        self._in_model = False
        for own, aside in self._aside.pieces(self._contents()):
            aside.copy_(own)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the model has the frozen weights; afterwards its own, bit for bit."""
        assert not self._in_model, "the initial weights are already in the model"
        self._in_model = True
        # Contents are swapped and tensors stay, because gradient buffers and the optimizer have views of them.
        self._aside.swap(self._contents())
        try:
            yield
        finally:
            self._aside.swap(self._contents())
            self._in_model = False

    def _contents(self) -> list[torch.Tensor]:
        # By tensor and not by storage, because wrapping the model for training moves its parameters into buffers.
        tensors = (tensor for chunk in self._chunks for tensor in (*chunk.parameters(), *chunk.buffers()))
        return [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]


_PIECE = 1 << 24
"""Number of float32 values on the device at once."""


class MovingAverage:
    """Averages of a rank's trained parameters on the host, which can take their place in the model.

    They are float32: in bfloat16 an average would lose changes that are small beside the weights.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], rate: float) -> None:
        """Begin with the current weights. `rate`: the share of the new weights in each `advance`."""
        self._rate = rate
        self._own = HostMemory()
        # Adapters of an engine that is not trained have no gradients.
        named = (pair for chunk in chunks for pair in chunk.named_parameters())
        self._parameters = [parameter for name, parameter in named if parameter.requires_grad or ADAPTER in name]
        ends = list(accumulate((parameter.numel() for parameter in self._parameters), initial=0))
        values = self._allocated(max(1, ends[-1]))
        self._averages = [
            values[start : start + parameter.numel()] for start, parameter in zip(ends, self._parameters, strict=False)
        ]
        for average, own in self._pieces():
            average.copy_(own)

    @torch.no_grad()
    def advance(self) -> None:
        """Replace each average by (1 - rate) * average + rate * current weight."""
        for average, own in self._pieces():
            moved = average.to(own.device)
            # Separate operations with separate rounding give the same bits for any split of a tensor.
            moved += self._rate * (own.float() - moved)
            average.copy_(moved)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the model has the averages, rounded to its own precision; afterwards its weights again."""
        contents = [parameter.detach().view(-1).view(torch.uint8) for parameter in self._parameters]
        for own, aside in self._own.pieces(contents):
            aside.copy_(own)
        for average, parameter in self._pieces():
            parameter.copy_(average.to(parameter.device))
        try:
            yield
        finally:
            for own, aside in self._own.pieces(contents):
                own.copy_(aside)

    def sharded(self, model: ShardedStateDict) -> ShardedStateDict:
        """The part of a checkpoint with the averages; `model` is the sharded state of a chunk, or its trained part."""
        # By address, because names in the state may differ from parameters' names.
        averages = {
            parameter.data_ptr(): average
            for parameter, average in zip(self._parameters, self._averages, strict=True)
            if parameter.numel()
        }
        return {
            name: replace(entry, key=AVERAGE + entry.key, data=average.view(entry.data.shape), **_dtype_of(entry))
            for name, entry in model.items()
            if isinstance(entry, ShardedTensor | ShardedTensorFactory)
            and entry.data is not None
            and (average := averages.get(entry.data.data_ptr())) is not None
        }

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            yield from zip(average.split(_PIECE), parameter.detach().view(-1).split(_PIECE), strict=True)

    def _allocated(self, count: int) -> torch.Tensor:
        """Float32 [count] on the host, pinned for the parameters' GPU."""
        if not any(parameter.is_cuda for parameter in self._parameters):
            return torch.empty(count)
        blocks: list[torch.Tensor] = []
        # At interpreter exit the driver unpins it.
        weakref.finalize(self, unpin, blocks).atexit = False
        add_pinned(blocks, 1, 4 * count)
        return blocks[0].view(torch.float32)


def _dtype_of(entry: ShardedTensor | ShardedTensorFactory) -> dict[str, torch.dtype]:
    return {"dtype": torch.float32} if isinstance(entry, ShardedTensor) else {}
