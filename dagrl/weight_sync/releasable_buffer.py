"""Memory for what is under way during a weight sync and is free at other times, with views that outlast its absence."""

from __future__ import annotations

import torch


class ReleasableBuffer:
    """Some memory of a device. Views of `bytes` stay good while the memory behind them comes and goes."""

    def __init__(self, nbytes: int, device: torch.device | str) -> None:
        """Take it."""
        # Generators work in inference mode, whose tensors could not be used outside of it.
        with torch.inference_mode(False):
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        """uint8 [nbytes]; what it holds is lost whenever the memory is given back."""

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.bytes.device

    @property
    def is_allocated(self) -> bool:
        """Whether the memory is taken now; room for nothing always is."""
        return self.bytes.untyped_storage().nbytes() == len(self.bytes)

    def take(self) -> None:
        """Take the memory, if it is not."""
        if not self.is_allocated:
            self.bytes.untyped_storage().resize_(len(self.bytes))

    def give_back(self) -> None:
        """Give it back to torch's allocator. Nothing may be under way in it, on any stream."""
        self.bytes.untyped_storage().resize_(0)
