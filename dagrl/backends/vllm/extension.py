"""Runs inside vLLM's worker processes, each of which holds a part of the model.

vLLM adds the methods of `Extension` to its workers (``worker_extension_cls``); `client.py` calls them.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from dagrl.backends.vllm.adapters import VllmAdapters
from dagrl.backends.vllm.fp8 import keep_cache_scales, load_weights
from dagrl.backends.vllm.versions import prepare_cpu
from dagrl.weight_sync.adapter_loader import AdapterLoader
from dagrl.weight_sync.channel import PeerError
from dagrl.weight_sync.loader import WeightLoader
from dagrl.weight_sync.receiver import Loader, Route, WeightReceiver

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

_log = logging.getLogger(__name__)

keep_cache_scales()
if current_platform.is_cpu():
    prepare_cpu()


class Extension:
    """Methods of vLLM's workers."""

    _receiver: WeightReceiver | None = None

    def dagrl_update_weights(self: Worker, route: str, alpha: float | None = None) -> None:
        """Receive the weights of one sync, or its adapters with their `alpha`.

        It reports failures to the sender, and must not end the worker.
        """
        if self._receiver is None:
            model = self.model_runner.model
            loader: Loader
            if alpha is None:
                loader = WeightLoader(lambda: dict(model.named_parameters()), partial(load_weights, model))
            else:
                loader = AdapterLoader(VllmAdapters(self.model_runner.lora_manager, alpha))
            who = f"vLLM's process {os.getpid()} (rank {self.rank} of its server)"
            self._receiver = WeightReceiver(loader, next(model.parameters()).device, who)
        try:
            self._receiver.receive(Route.from_json(route))
        except PeerError as error:
            _log.error("no new weights: %s", error)
