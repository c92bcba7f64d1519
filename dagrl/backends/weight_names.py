"""Checks the tensor names of published weights against a model's config.

Used wherever weights are read, so that all engines accept the same folders.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Set
from typing import TYPE_CHECKING

from dagrl.backends.families import tensors
from dagrl.backends.families.tensors import DERIVED, SCALES
from dagrl.config.errors import counted

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PREDICTION_LAYERS = "num_nextn_predict_layers"
"""The config's number of multi-token prediction layers, which follow the model's own."""
_log = logging.getLogger(__name__)


def check_names(names: Iterable[str], wanted: Set[str], hf_config: PretrainedConfig) -> None:
    """Raise ValueError for weights that the model has no parameter for, which would be dropped silently.

    `names` are those of the weights, `wanted` those of the model. Multi-token prediction layers are dropped with a
    warning, buffers that follow from the config without one.
    """
    unknown = sorted(name for name in names if name not in wanted and not name.endswith(DERIVED))
    if any(name.endswith(SCALES) for name in unknown):
        raise ValueError(
            "the weights are in 8 bits, with scales beside them: the engine trains 16- or 32-bit weights; "
            "convert the folder to bfloat16 first"
        )
    extra = [name for name in unknown if is_prediction_layer(name, hf_config)]
    if extra:
        _log.warning(
            "the weights hold %d tensors of layers that predict further tokens (%s and others); "
            "they are left out: neither trained nor exported",
            *(len(extra), extra[0]),
        )
    unknown = [name for name in unknown if not is_prediction_layer(name, hf_config)]
    if unknown:
        raise ValueError(
            f"the weights hold {counted(len(unknown), 'tensor')} that a {hf_config.model_type} of this config does not "
            f"have, {unknown[0]!r} among them"
        )


def is_prediction_layer(name: str, hf_config: PretrainedConfig) -> bool:
    """Whether a tensor belongs to multi-token prediction layers, which published models store after their own."""
    extra = getattr(hf_config, PREDICTION_LAYERS, None) or 0
    return tensors.is_prediction_layer(name, hf_config.get_text_config().num_hidden_layers, extra)
