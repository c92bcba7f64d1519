"""Runs inside SGLang's processes: takes new weights into the part of the model that a process holds.

SGLang calls `update_weights` in each of them for one update. It must not raise: that would end the process, and with it
the server. What goes wrong is told to whoever sends the weights, which makes the sync fail there.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any

import torch

from dagrl.weight_sync.channel import PeerError
from dagrl.weight_sync.loader import WeightLoader
from dagrl.weight_sync.receiver import Route, WeightReceiver

_log = logging.getLogger(__name__)
_takers: weakref.WeakKeyDictionary[torch.nn.Module, WeightReceiver] = weakref.WeakKeyDictionary()


def update_weights(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Take the weights of one sync; the only tensor has the `Route` in it, as text in uint8. Without one, nothing."""
    ((_, payload),) = named_tensors
    if not len(payload):
        return
    route = Route.from_json(bytes(payload.cpu().numpy()).decode())
    if model not in _takers:
        _takers[model] = _taker(model)
    try:
        _takers[model].take(route)
    except PeerError as error:
        _log.error("no new weights: %s", error)


def _taker(model: Any) -> WeightReceiver:
    from sglang.srt.distributed import get_world_group

    device = next(model.parameters()).device
    intake = WeightLoader(lambda: dict(model.named_parameters()), model.load_weights)
    return WeightReceiver(
        intake, device, f"SGLang's process {os.getpid()} (rank {get_world_group().rank_in_group} of its server)"
    )
