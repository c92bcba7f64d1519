"""The weights that a model started from, frozen beside those it trains: a reference that costs host memory only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from dagrl.backends.device_memory import HostMemory


class StartWeights:
    """A copy of a model's weights on the host, which can change places with the model's own."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Copy the weights as they are now."""
        self._chunks = chunks
        # One after the other: pinned memory for each by itself would be rounded up to a power of two.
        self._aside = HostMemory()
        self._in_model = False
        for own, aside in self._aside.pieces(self._contents()):
            aside.copy_(own)

    @property
    def nbytes(self) -> int:
        """Host memory that the copy takes."""
        return self._aside.nbytes

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the context the model has the frozen weights; afterwards its own again, to the bit."""
        assert not self._in_model, "the start weights are in the model already"
        self._in_model = True
        # Contents change places, tensors stay: gradient buffers and the optimizer hold views of them.
        self._aside.swap(self._contents())
        try:
            yield
        finally:
            self._aside.swap(self._contents())
            self._in_model = False

    def _contents(self) -> list[torch.Tensor]:
        """The bytes of each tensor of the weights."""
        # By tensor and not by storage, for wrapping the model for training moves its parameters into buffers.
        tensors = (tensor for chunk in self._chunks for tensor in (*chunk.parameters(), *chunk.buffers()))
        return [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
