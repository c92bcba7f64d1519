"""Weights in fp8 inside SGLang's processes. For SGLang 0.5.17.

On GPUs of the Ada and Hopper generations, SGLang computes with blockwise fp8 as it is loaded, so that new weights can
be written in place. For Blackwell it rounds scales to powers of two and packs them when it has loaded a model
(``requant_block_scale_ue8m0_for_deepgemm``), which such an update would miss.

SGLang transposes weights with a scale for each channel without a copy, and replaces their parameters by plain ones,
which its loaders do not recognise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from dagrl.backends.serving.loadable import substituted


def sent_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters that a trainer sends: all except the scales of an fp8 cache, which SGLang sets itself."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not getattr(parameter, "_skip_weight_check", False)
    }


def load_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> object:
    """Load `weights` with the model's own loader. Raises ValueError if SGLang has packed its scales."""
    packed = [name for name, parameter in model.named_parameters() if getattr(parameter, "format_ue8m0", False)]
    if packed:
        raise ValueError(f"this GPU's kernels pack the scales of fp8, such as {packed[0]}; remove `quantization`")
    with substituted(_loadable(model)):
        return model.load_weights(weights)


def _loadable(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    """Parameters of layers with a scale for each channel, in their original form and current memory."""
    layer: Any
    for layer in model.modules():
        if type(getattr(layer, "scheme", None)).__name__ == "CompressedTensorsW8A8Fp8":
            from sglang.srt.layers.parameter import ChannelQuantScaleParameter, ModelWeightParameter

            loader, weight, scale = layer.weight_loader_v2, layer.weight.data.t(), layer.weight_scale.data
            yield layer, "weight", ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=loader)
            yield layer, "weight_scale", ChannelQuantScaleParameter(data=scale, output_dim=0, weight_loader=loader)


@torch.no_grad()
def restore_cache_scales(model: torch.nn.Module) -> None:
    """Restore the scales of an fp8 cache, which a sleep drops with the weights."""
    module: Any
    for module in model.modules():
        # None if attention's cache is not in fp8.
        if getattr(module, "k_scale_float", None) is not None:
            module.k_scale.fill_(module.k_scale_float)
            module.v_scale.fill_(module.v_scale_float)
