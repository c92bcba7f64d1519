"""Weights in fp8 inside vLLM's processes. For vLLM 0.26.0.

After loading, vLLM replaces parameters of quantised layers by plain ones, which its loaders do not recognise. The
kernels that `engine.py` chooses keep memory, dtype and shape, or transpose the weights without a copy, so that new
weights can be written in place through parameters as they were before (recorded by
`vllm.model_executor.model_loader.reload`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dagrl.backends.serving.loadable import substituted
from dagrl.config.fp8_weights import SCALE_SUFFIXES

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization import QuantizationConfig
    from vllm.model_executor.models.interfaces_base import VllmModel

_SCALES = tuple(f"weight{suffix}" for suffix in SCALE_SUFFIXES.values())
"""Ends of the names of parameters with scales."""


def keep_cache_scales() -> None:
    """Keep the scales of an fp8 cache at 1 if no checkpoint is read; called before a model is loaded. vLLM would use
    random numbers, with which it fills all tensors of a checkpoint.
    """
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    for config in (CompressedTensorsConfig, Fp8Config):
        config.get_quant_method = _without_cache_scales(config.get_quant_method)


def _without_cache_scales(
    choose: Callable[[QuantizationConfig, torch.nn.Module, str], object],
) -> Callable[[QuantizationConfig, torch.nn.Module, str], object]:
    """A method that applies `choose` to layers, and does nothing for attention."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    def get_quant_method(config: QuantizationConfig, layer: torch.nn.Module, prefix: str) -> object:
        if isinstance(layer, Attention) and get_current_vllm_config().load_config.load_format == "dummy":
            return None
        return choose(config, layer, prefix)

    return get_quant_method


def load_weights(model: VllmModel, weights: Iterable[tuple[str, Tensor]]) -> object:
    """Load `weights` with the model's own loader. Raises ValueError if a kernel's layout differs from the weights'."""
    with substituted(_loadable(model)):
        return model.load_weights(weights)


def _loadable(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Parameters of quantised layers with their original classes, loaders and shapes, in current memory."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    for path, layer in model.named_modules():
        if not any(name.endswith(_SCALES) for name in layer._parameters):
            continue
        built, _ = get_layerwise_info(layer).restore_metadata
        for name, current in layer._parameters.items():
            meta = built.get(name)
            if current is None or meta is None:
                continue
            alias = current.data if _are_alike(current, meta) else current.data.transpose(0, -1)
            if not _are_alike(alias, meta):
                raise ValueError(
                    f"vLLM's kernels hold {path}.{name} as {current.dtype} {list(current.shape)} instead of "
                    f"{meta.dtype} {list(meta.shape)}; remove `quantization`"
                )
            alias.__class__, alias.__dict__ = type(meta), meta.__dict__.copy()
            yield layer, name, restore_layer_refs(alias, layer)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
