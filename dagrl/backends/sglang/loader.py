"""Receives new weights inside SGLang's scheduler processes, each of which holds a part of the model.

SGLang calls `update_weights` in each process for one update. It must not raise, because that would end the server;
failures are reported to the sender of the weights, where the sync fails.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dagrl.backends.sglang.adapters import SglangAdapters, find_manager
from dagrl.backends.sglang.fp8 import load_weights, restore_cache_scales, sent_parameters
from dagrl.backends.sglang.versions import image_module
from dagrl.weight_sync.adapter_loader import AdapterLoader
from dagrl.weight_sync.channel import PeerError
from dagrl.weight_sync.loader import WeightLoader
from dagrl.weight_sync.receiver import Loader, Route, WeightReceiver

_log = logging.getLogger(__name__)
_receivers: weakref.WeakKeyDictionary[torch.nn.Module, WeightReceiver] = weakref.WeakKeyDictionary()


def update_weights(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Receive the weights of one sync. The only tensor holds the `Route` as uint8 text; if it is empty, do nothing."""
    if text := _text(named_tensors):
        loader = partial(WeightLoader, partial(sent_parameters, model), partial(load_weights, model))
        _receive(model, text, loader)
        restore_cache_scales(model)
        renew_gates(model)
        _forget_images()


def update_adapters(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Receive the low-rank adapters of one sync. The text is their `alpha`, a line break and the `Route`."""
    alpha, _, text = _text(named_tensors).partition("\n")
    _receive(model, text, lambda: AdapterLoader(SglangAdapters(find_manager(), float(alpha))))


def _text(named_tensors: list[tuple[str, torch.Tensor]]) -> str:
    ((_, payload),) = named_tensors
    return bytes(payload.cpu().numpy()).decode()


def _receive(model: Any, route: str, make_loader: Callable[[], Loader]) -> None:
    if model not in _receivers:
        from sglang.srt.distributed.parallel_state import get_world_group

        who = f"SGLang's process {os.getpid()} (rank {get_world_group().rank_in_group} of its server)"
        _receivers[model] = WeightReceiver(make_loader(), next(model.parameters()).device, who)
    try:
        _receivers[model].receive(Route.from_json(route))
    except PeerError as error:
        _log.error("no new weights: %s", error)


def renew_gates(model: torch.nn.Module) -> None:
    """Overwrite the float32 copies of the weights in GLM's gates, in place, because captured CUDA graphs read their
    memory.
    """
    copies = [
        (copied, gate.get_parameter("weight"))
        for gate in model.modules()
        if (copied := gate._buffers.get("_weight_fp32")) is not None
    ]
    with torch.no_grad():
        for copied, weight in copies:
            copied.copy_(weight)
    if copies and copies[0][0].is_cuda:
        # Requests run on another stream.
        torch.cuda.current_stream().synchronize()


def _forget_images() -> None:
    """Drop embeddings of images by the tower's old weights; SGLang would reuse them for the same images."""
    if (cache := image_module().embedding_cache) is not None:
        cache.clear()
