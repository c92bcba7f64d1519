"""Arrays on their way to the device, which works on earlier ones meanwhile."""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, complete for work that is queued there afterwards.

    The host does not wait: a copy from memory that is not pinned would wait for all queued work.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
