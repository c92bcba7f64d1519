"""Names of tensors in published checkpoints, and their check against a model's config."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Set
from typing import TYPE_CHECKING

from dagrl.config.errors import counted

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PREDICTION_LAYERS = "num_nextn_predict_layers"
"""The config's number of multi-token prediction layers, which follow the model's own."""
OUTPUT = "lm_head.weight"
SCORE = "score.weight"
"""The head of a critic or reward model, [1, hidden size]."""
DERIVED = ("rotary_emb.inv_freq",)
"""Ends of names in old weight files that follow from the config."""
SCALES = ("weight_scale_inv", "weight_scale")
"""Ends of names beside weights that are stored in 8 bits."""
QUANTISED = (*SCALES, ".qweight", ".qzeros", ".weight_packed", ".absmax", ".SCB")
"""Ends of names of quantised weights in gptq, awq, compressed-tensors, bitsandbytes and fp8."""

_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")
_log = logging.getLogger(__name__)


def check_names(names: Iterable[str], wanted: Set[str], hf_config: PretrainedConfig) -> None:
    """Raise ValueError for weights without a parameter in the model, which would be dropped silently.

    `names` belong to the weights, `wanted` to the model. Multi-token prediction layers are dropped with a warning,
    buffers that follow from the config without one.
    """
    unknown = sorted(name for name in names if name not in wanted and not name.endswith(DERIVED))
    if any(name.endswith(SCALES) for name in unknown):
        raise ValueError(
            "the weights are in 8 bits, with scales beside them: the engine trains 16- or 32-bit weights; "
            "convert the folder to bfloat16 first"
        )
    extra = [name for name in unknown if is_predicting(name, hf_config)]
    if extra:
        _log.warning(
            "the weights hold %d tensors of layers that predict further tokens (%s and others); "
            "they are left out: neither trained nor exported",
            *(len(extra), extra[0]),
        )
    unknown = [name for name in unknown if not is_predicting(name, hf_config)]
    if unknown:
        raise ValueError(
            f"the weights hold {counted(len(unknown), 'tensor')} that a {hf_config.model_type} of this config does not "
            f"have, {unknown[0]!r} among them"
        )


def is_predicting(name: str, hf_config: PretrainedConfig) -> bool:
    """Whether a tensor belongs to multi-token prediction layers, which published models store after their own."""
    extra = getattr(hf_config, PREDICTION_LAYERS, None) or 0
    return is_prediction_layer(name, hf_config.get_text_config().num_hidden_layers, extra)


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a tensor belongs to; None for tensors outside the layers."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def is_prediction_layer(name: str, layers: int, prediction_layers: int) -> bool:
    """Whether a tensor belongs to the layers for multi-token prediction.

    They follow the model's own `layers`, or have a separate block, as in Qwen3-Next.
    """
    layer = layer_of(name)
    return name.startswith("mtp.") or (layer is not None and 0 <= layer - layers < prediction_layers)
