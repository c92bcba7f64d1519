"""Seconds of what moves between the stages of a step: weights to generators, engines out of memory and back, files."""

from __future__ import annotations

from dagrl.plan.cost.device import Device
from dagrl.plan.weight_route import Way

_SYNC_S = 21e-3
"""Of a weight sync whatever its size: the driver's calls and SGLang's pause (14 ms), its processes told (7)."""
_BROADCAST_SHARE = 1.03
"""Buckets against a device's link to its peers: 9.4 ms for 3.44 GB, 51.5 ms for 16.4 GB."""
_SAME_GPU_SHARE = 0.075
"""Buckets handed over on one GPU, against its memory: tensors gathered, renamed, copied, at 284 GB/s."""
_OBJECT_STORE_BYTES_PER_S = 0.5e9
_OBJECT_STORE_S = 0.01
_GATHER_SHARE = 1.0
"""Of the link, where shards of a bucket are gathered before it is sent."""
_SLEEP_S = 0.005
"""Of a trainer that gives its memory back, whatever it keeps."""
_COMMUNICATORS_S = 0.38
"""To close those between the ranks of a model; with data parallelism alone there are none."""
_RECONNECT_S = 0.3
"""NCCL, in the first task after that; not measured apart."""
_SWAP_SHARE = 0.56
"""Of the rates between host and GPU, as it was tensor by tensor, each waited for; both ways go at once since, which has
not been measured."""
_SERVER_SLEEP_S = 0.025
_SERVER_WAKE_S = 0.01
"""SGLang's release and resume, and the calls: 21 to 38 ms, 9 to 14 ms."""
_DISK_BYTES_PER_S = 1e9
"""Of a machine's share in where checkpoints are written; an order of magnitude."""
_SAVE_S = 1.0
COMMIT_S = 5e-3
"""The metrics of a step written down."""
RESTART_S = 60.0
"""Worker, libraries and a server without prefill graphs; 1.7B takes about 30 s."""


def sync_seconds(way: Way, weights: float, device: Device, *, link: float, gathered: float) -> float:
    """New weights from trainer to generators. `weights` in bytes; `link` between their GPUs, bytes a second; `gathered`
    is the share of the weights that the sender's neighbours hold.
    """
    if way == "object_store":
        return _OBJECT_STORE_S + weights / _OBJECT_STORE_BYTES_PER_S
    rate = device.memory * _SAME_GPU_SHARE if way == "cuda_ipc" else link * _BROADCAST_SHARE
    return _SYNC_S + weights / rate + gathered * weights / (device.peers * _GATHER_SHARE)


def trainer_down_seconds(kept: float, device: Device) -> float:
    """A trainer leaves all but its weights; `kept` bytes of each of its GPUs go to the host."""
    return (_SLEEP_S if device.is_gpu else 0.0) + kept / device.to_host


def trainer_sleep_seconds(kept: float, device: Device, *, model_ranks: int) -> float:
    """A trainer leaves its GPUs; `kept` bytes of each go to the host."""
    if not device.is_gpu:
        return kept / device.to_host
    return _SLEEP_S + kept / device.to_host + (_COMMUNICATORS_S if model_ranks > 1 else 0.0)


def trainer_wake_seconds(kept: float, device: Device, *, model_ranks: int) -> float:
    """And comes back."""
    return kept / device.from_host + (_RECONNECT_S if device.is_gpu and model_ranks > 1 else 0.0)


def server_sleep_seconds(kept: float, device: Device) -> float:
    """A server gives its memory back; `kept` bytes of each GPU, the weights that nobody sends again, go to the host."""
    return _SERVER_SLEEP_S + kept / device.to_host


def server_wake_seconds(kept: float, device: Device) -> float:
    """And takes it again."""
    return _SERVER_WAKE_S + kept / device.from_host


def swap_seconds(weights: float, device: Device) -> float:
    """A rank's weights, in bytes, change places with those that wait on the host, and back again."""
    return 2 * weights * (1 / device.to_host + 1 / device.from_host) / _SWAP_SHARE


def save_seconds(state: float, device: Device, *, per_node: int, background: bool) -> float:
    """A rank's state of so many bytes goes into a checkpoint, beside those of its machine; to the host alone where it
    is written in the `background`.
    """
    return _SAVE_S + (state / device.to_host if background else state * per_node / _DISK_BYTES_PER_S)
