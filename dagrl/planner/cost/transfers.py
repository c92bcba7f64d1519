"""Seconds of what moves between the stages of a step: weights to generators, engines out of memory and back, files."""

from __future__ import annotations

from dagrl.config.schema.engine import Transport
from dagrl.planner.cost.communicators import closing_seconds
from dagrl.planner.cost.device import Device

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
_DOWN_S = 0.06
"""Of a trainer that goes down to its weights, whatever it keeps: its passes' memory is given back (0.06 to 0.16 s)."""
_DOWN_OF_SEVERAL_S = 0.15
"""The same of the slower of two ranks: 0.15 s on average of 16 sleeps in eight runs (0.07 to 0.31)."""
_SLEEP_S = 0.01
"""The same from there to asleep."""
_OPEN_S = 0.02
"""Of several ranks that wake: groups are made anew, communicators follow with the first task."""
_SWAP_SHARE = 0.56
"""Of the rates between host and GPU, as it was tensor by tensor, each waited for; both ways go at once since, which has
not been measured."""
_SERVER_SLEEP_S = 0.05
_SERVERS_SLEEP_S = 0.1
"""SGLang's release, and the calls: 0.02 to 0.06 s on one GPU; on two, the slower, 0.05 to 0.19 s."""
_SERVER_WAKE_S = 0.025
"""SGLang's resume, and the calls."""
_RETURN_BYTES_PER_S = 135e9
"""Room for weights, that others have just left: 0.03 to 0.08 s for 3.4 GB, 0.12 to 0.14 s for 16.4."""
_DISK_BYTES_PER_S = 1e9
"""Of a machine's share in where checkpoints are written; an order of magnitude."""
_SAVE_S = 1.0
COMMIT_S = 5e-3
"""The metrics of a step written down."""
RESTART_S = 60.0
"""Worker, libraries and a server without prefill graphs; 1.7B takes about 30 s."""


def sync_seconds(
    way: Transport, weights: float, device: Device, *, link: float, gathered: float, neighbours: float
) -> float:
    """New weights from trainer to generators. `weights` in bytes; `link` between their GPUs, bytes a second; `gathered`
    is the share of the weights that the sender's neighbours hold, and `neighbours` the rate from there.
    """
    if way == "object_store":
        return _OBJECT_STORE_S + weights / _OBJECT_STORE_BYTES_PER_S
    rate = device.memory * _SAME_GPU_SHARE if way == "cuda_ipc" else link * _BROADCAST_SHARE
    return _SYNC_S + weights / rate + gathered * weights / (neighbours * _GATHER_SHARE)


def trainer_down_seconds(kept: float, device: Device, *, ranks: int) -> float:
    """A trainer on so many GPUs leaves all but its weights; `kept` bytes of each go to the host."""
    fixed = _DOWN_S if ranks == 1 else _DOWN_OF_SEVERAL_S
    return (fixed if device.is_gpu else 0.0) + kept / device.to_host


def trainer_sleep_seconds(kept: float, device: Device, *, closing: int) -> float:
    """A trainer leaves its GPUs; `kept` bytes of each go to the host. `closing` ranks close what joins them, if any."""
    if not device.is_gpu:
        return kept / device.to_host
    return _SLEEP_S + kept / device.to_host + closing_seconds(closing)


def trainer_wake_seconds(kept: float, device: Device, *, closed: int) -> float:
    """And comes back, but for communicators that `closed` ranks have given up."""
    return kept / device.from_host + (_OPEN_S if device.is_gpu and closed > 1 else 0.0)


def server_sleep_seconds(kept: float, device: Device, *, ranks: int) -> float:
    """Servers on so many GPUs give their memory back; `kept` bytes of each, the weights that nobody sends again, go to
    the host.
    """
    return (_SERVER_SLEEP_S if ranks == 1 else _SERVERS_SLEEP_S) + kept / device.to_host


def server_wake_seconds(weights: float, kept: float, device: Device) -> float:
    """And take it again: room for `weights` bytes on each GPU, `kept` of which come from the host."""
    return _SERVER_WAKE_S + weights / _RETURN_BYTES_PER_S + kept / device.from_host


def swap_seconds(weights: float, device: Device) -> float:
    """A rank's weights, in bytes, change places with those that wait on the host, and back again."""
    return 2 * weights * (1 / device.to_host + 1 / device.from_host) / _SWAP_SHARE


def save_seconds(state: float, device: Device, *, on_host: float, per_node: int, background: bool) -> float:
    """A rank's state of so many bytes, and what it has `on_host` beside that, goes into a checkpoint, with those of its
    machine; to the host alone where it is written in the `background`.
    """
    return _SAVE_S + (state / device.to_host if background else (state + on_host) * per_node / _DISK_BYTES_PER_S)
