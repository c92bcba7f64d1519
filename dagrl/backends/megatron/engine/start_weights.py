"""The model's frozen initial weights in host memory, as a reference policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from dagrl.backends.runtime.device_memory import HostMemory


class StartWeights:
    """A copy of a model's weights on the host, which can be swapped with the model's own."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Copy the current weights."""
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
        """The weights as tensors of bytes."""
        # By tensor and not by storage, because wrapping the model for training moves its parameters into buffers.
        tensors = (tensor for chunk in self._chunks for tensor in (*chunk.parameters(), *chunk.buffers()))
        return [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
