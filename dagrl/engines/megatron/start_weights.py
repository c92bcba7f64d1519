"""The weights that a model started from, frozen beside those it trains: a reference that costs host memory only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class StartWeights:
    """A copy of a model's weights on the host, which can change places with the model's own."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Copy the weights as they are now."""
        self._chunks = chunks
        self._aside = [_host_copy(tensor) for tensor in self._tensors()]
        self._in_model = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the context the model has the frozen weights; afterwards its own again, to the bit."""
        assert not self._in_model, "the start weights are in the model already"
        self._in_model = True
        self._swap()
        try:
            yield
        finally:
            self._swap()
            self._in_model = False

    @torch.no_grad()
    def _swap(self) -> None:
        # Contents change places, tensors stay: gradient buffers and the optimizer hold views of them.
        for tensor, aside in zip(self._tensors(), self._aside, strict=True):
            own = tensor.clone()
            tensor.copy_(aside)
            aside.copy_(own)

    def _tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self._chunks:
            yield from chunk.parameters()
            yield from chunk.buffers()


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    return copy.copy_(tensor.detach())
