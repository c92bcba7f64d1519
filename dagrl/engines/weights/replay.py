"""Makes the copies of a recorded load again, from any buffer that holds the same bucket: a few calls a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dagrl.engines.weights.copies import Copies
from dagrl.engines.weights.recording import Copied


class Replay:
    """What a model copies out of one bucket."""

    def __init__(self, copied: Sequence[Copied]) -> None:
        self._copied = copied
        self._bound: tuple[Tensor, Copies] | None = None

    def run(self, buffer: Tensor) -> None:
        """Copy from `buffer`, uint8, into the parameters. It costs least where the buffer is the last one's object."""
        if self._bound is None or self._bound[0] is not buffer:
            self._bound = buffer, self._copies(buffer)
        self._bound[1].run()

    def let_go(self) -> None:
        """Forget the last buffer, whose memory may be somebody else's."""
        self._bound = None

    def _copies(self, buffer: Tensor) -> Copies:
        memory = buffer.untyped_storage()
        assert buffer.storage_offset() == 0, "a bucket begins where its memory does"
        pairs = []
        for copy in self._copied:
            source = torch.empty(0, dtype=copy.dtype, device=buffer.device)
            source.set_(memory, copy.offset, copy.shape, copy.stride)
            pairs.append((copy.target, source))
        return Copies(pairs)
