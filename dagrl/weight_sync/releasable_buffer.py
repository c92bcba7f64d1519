"""Device memory that is needed only during a weight sync."""

from __future__ import annotations

import torch


class ReleasableBuffer:
    """A buffer that releases and allocates its memory again. Views of `bytes` stay valid across both."""

    def __init__(self, nbytes: int, device: torch.device | str) -> None:
        """Allocate `nbytes`."""
        # Generators run in inference mode, whose tensors cannot be used outside it.
        with torch.inference_mode(False):
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        """uint8 [nbytes]; the contents are lost on release."""

    @property
    def is_allocated(self) -> bool:
        """Whether the memory is allocated; always true for a buffer of no bytes."""
        return self.bytes.untyped_storage().nbytes() == len(self.bytes)

    def allocate(self) -> None:
        """Allocate the memory, if it is not."""
        if not self.is_allocated:
            self.bytes.untyped_storage().resize_(len(self.bytes))

    def release(self) -> None:
        """Return the memory to torch's allocator. No stream may still use it."""
        self.bytes.untyped_storage().resize_(0)
