"""Weights in fp8 inside vLLM's processes. For vLLM 0.26.0.

After loading, vLLM replaces parameters of quantised layers by plain ones, which its loaders do not recognise. The
kernels that `engine.py` chooses keep memory, shape and dtype, so that new weights can be written in place through
parameters as they were before (`vllm.model_executor.model_loader.reload` has recorded those).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dagrl.config.block_fp8 import SCALE_SUFFIX

_SCALES = f"weight{SCALE_SUFFIX}"
"""End of the names of parameters with scales."""


def load_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> object:
    """Load `weights` with the model's own loader. Raises ValueError if a kernel has another layout than the weights."""
    with loadable_parameters(model):
        return model.load_weights(weights)


@contextmanager
def loadable_parameters(model: torch.nn.Module) -> Iterator[None]:
    """Context in which the model's parameters have the classes and loaders of its construction, in the same memory."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    replaced: list[tuple[torch.nn.Module, str, Any]] = []
    try:
        for path, layer in model.named_modules():
            if not any(name.endswith(_SCALES) for name in layer._parameters):
                continue
            built, _ = get_layerwise_info(layer).restore_metadata
            for name, current in layer._parameters.items():
                meta = built.get(name)
                if current is None or meta is None:
                    continue
                if (meta.shape, meta.dtype, meta.stride()) != (current.shape, current.dtype, current.stride()):
                    raise ValueError(
                        f"vLLM's kernels hold {path}.{name} as {current.dtype} {list(current.shape)} instead of "
                        f"{meta.dtype} {list(meta.shape)}; remove `quantization`"
                    )
                alias: Any = current.data
                alias.__class__, alias.__dict__ = type(meta), meta.__dict__.copy()
                replaced.append((layer, name, current))
                layer._parameters[name] = restore_layer_refs(alias, layer)
        yield
    finally:
        for layer, name, current in replaced:
            layer._parameters[name] = current
