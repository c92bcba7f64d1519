"""Receives new weights inside SGLang's scheduler processes, each of which holds a part of the model.

SGLang calls `update_weights` in each process for one update. It must not raise, because that would end the server;
failures are reported to the sender of the weights, where the sync fails.
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
_receivers: weakref.WeakKeyDictionary[torch.nn.Module, WeightReceiver] = weakref.WeakKeyDictionary()


def update_weights(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Receive the weights of one sync. The only tensor holds the `Route` as uint8 text; if it is empty, do nothing."""
    ((_, payload),) = named_tensors
    if not len(payload):
        return
    route = Route.from_json(bytes(payload.cpu().numpy()).decode())
    if model not in _receivers:
        _receivers[model] = _receiver(model)
    try:
        _receivers[model].receive(route)
    except PeerError as error:
        _log.error("no new weights: %s", error)


def _receiver(model: Any) -> WeightReceiver:
    from sglang.srt.distributed import get_world_group

    device = next(model.parameters()).device
    loader = WeightLoader(lambda: dict(model.named_parameters()), model.load_weights)
    return WeightReceiver(
        loader, device, f"SGLang's process {os.getpid()} (rank {get_world_group().rank_in_group} of its server)"
    )
