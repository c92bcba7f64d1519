"""What published weights hold beside the model of their config, by its tensors' names: what is left out, what refused.

Every way into a model asks here, so that a folder which one of them takes is taken by all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Set
from typing import TYPE_CHECKING

from dagrl.backends.families import tensors
from dagrl.backends.families.tensors import DERIVED, SCALES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PREDICTION_LAYERS = "num_nextn_predict_layers"
"""The config's field for how many layers predict further tokens; they stand behind the model's own."""
_log = logging.getLogger(__name__)


def check_names(names: Iterable[str], wanted: Set[str], hf_config: PretrainedConfig) -> None:
    """ValueError for weights that the model has no place for: they would be left out without a word.

    `names` are those of the weights, `wanted` those that have a place. Layers that predict further tokens are left out
    with a warning, and what follows from the config without one.
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
            f"the weights hold {len(unknown)} tensors that a {hf_config.model_type} of this config does not have, "
            f"{unknown[0]!r} among them"
        )


def is_prediction_layer(name: str, hf_config: PretrainedConfig) -> bool:
    """Whether a tensor is of the layers for multi-token prediction, which published models have behind their own."""
    extra = getattr(hf_config, PREDICTION_LAYERS, None) or 0
    return tensors.is_prediction_layer(name, hf_config.num_hidden_layers, extra)
