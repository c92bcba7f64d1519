"""Auxiliary losses of a mixture's routers: averaged over the global batch, and reported as metrics.

Megatron attaches them to the router's output in the forward pass; they are not part of the loss returned by `step`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from dagrl.data.stats import Stat

_TRACKED = {
    "aux_loss": ("load_balancing_loss", "moe/aux_loss"),
    "global_aux_loss": ("global_load_balancing_loss", "moe/global_aux_loss"),
}
"""Kind of load balancing -> Megatron's name of the loss, and the metric's name."""


class MoeLosses:
    """The router losses of one gradient. Does nothing without a mixture or without such losses."""

    def __init__(self, config: TransformerConfig) -> None:
        self._config = config
        self._names = _tracked(config)
        self._micro_batches = 0

    @contextmanager
    def scaled_by(self, tokens_of: Sequence[int]) -> Iterator[None]:
        """Context in which each micro-batch's loss is weighted by its share of all ranks' tokens, `tokens_of` it with
        padding.

        Megatron multiplies the loss by the micro-batch's tokens, and divides all gradients at the end; here they are
        divided already.
        """
        if not self._names:
            yield
            return
        self._micro_batches = len(tokens_of)
        tokens = torch.tensor(float(sum(tokens_of)), device=torch.cuda.current_device())
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        self._config.moe_grad_scale_func = lambda: 1.0 / tokens
        get_moe_metrics_tracker().clear()
        try:
            yield
        finally:
            del self._config.moe_grad_scale_func

    def metrics(self) -> dict[str, Stat]:
        """Mean of each loss over layers and micro-batches, before its coefficient; on every rank."""
        if not self._names:
            return {}
        config = self._config
        means: dict[str, torch.Tensor] = {}
        get_moe_metrics_tracker().report(
            loss_scale=1.0 / self._micro_batches,
            iteration=0,
            track_names=list(self._names),
            # Stages with only dense layers take part with zeros.
            force_initialize=True,
            num_layers=config.num_layers,
            moe_layer_freq=config.moe_layer_freq,
            total_loss_dict=means,
        )
        return {metric: Stat.weighted(float(means[name]), 1.0) for name, metric in self._names.items()}


def _tracked(config: TransformerConfig) -> dict[str, str]:
    if config.num_moe_experts is None:
        return {}
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    weights = coefficients if isinstance(coefficients, list) else [coefficients] * len(kinds)
    names = dict(_TRACKED[kind] for kind, weight in zip(kinds, weights, strict=True) if kind in _TRACKED and weight)
    return names | ({"z_loss": "moe/z_loss"} if config.moe_z_loss_coeff else {})
