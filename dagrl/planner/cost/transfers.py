"""Seconds of weight syncs, commits and restarts."""

from __future__ import annotations

from dagrl.backends.device_rates import DeviceRates
from dagrl.config.schema.engine import Transport

_SYNC_S = 21e-3
"""Of a weight sync of any size: the driver's calls and the pause of the servers (14 ms), and of their processes (7)."""
_BROADCAST_SHARE = 1.03
"""Buckets against a device's link to its peers: 9.4 ms for 3.44 GB, 51.5 ms for 16.4 GB."""
_SAME_GPU_SHARE = 0.075
"""Buckets handed over on one GPU, against its memory: tensors gathered, renamed, copied, at 284 GB/s."""
_OBJECT_STORE_BYTES_PER_S = 0.5e9
_OBJECT_STORE_S = 0.01
COMMIT_S = 5e-3
"""The metrics of a step are written."""
RESTART_S = 60.0
"""Worker, libraries and a server without prefill graphs; 1.7B takes about 30 s."""


def sync_seconds(
    way: Transport, weights: float, device: DeviceRates, *, link: float, gathered: float, neighbours: float
) -> float:
    """Return the seconds of a weight sync of `weights` bytes, with `link` bytes a second between sender and receiver.

    The sender gathers a share `gathered` of the weights from its neighbours, at a rate of `neighbours`.
    """
    if way == "object_store":
        return _OBJECT_STORE_S + weights / _OBJECT_STORE_BYTES_PER_S
    rate = device.memory * _SAME_GPU_SHARE if way == "cuda_ipc" else link * _BROADCAST_SHARE
    return _SYNC_S + weights / rate + gathered * weights / neighbours
