"""Keys of config.json for transformers 4 and servers, beside the ones that transformers 5 writes.

Readers ignore unknown keys: without ``rope_theta``, transformers 4 silently uses 10000.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dagrl.model_files.hf_config import HfConfig

_TEXT = "text_config"
_TOWER = "vision_config"
_FULL = "full_attention"
_OWN = ("quantization_config", "torch_dtype", "_name_or_path")
"""Keys of a source that do not apply to the folder's weights, which have another dtype and are not quantised."""


def with_older_keys(config: HfConfig, other_names: Mapping[str, str], source: HfConfig) -> dict[str, Any]:
    """`config` of transformers 5 with the keys of transformers 4 and the keys that only `source` has.

    `other_names` are further names of fields, from config classes. Values of `config` are kept.
    """
    whole = {**_older(config), **config}
    whole |= {name: whole[field] for name, field in other_names.items() if field in whole and name not in whole}
    if isinstance(text := config.get(_TEXT), Mapping):
        nested = source.get(_TEXT)
        whole[_TEXT] = with_older_keys(text, {}, nested if isinstance(nested, Mapping) else {})
    if isinstance(tower := config.get(_TOWER), Mapping) and "num_position_embeddings" in tower:
        # Layers to which the tower of Qwen3-VL adds. Qwen3.5's tower adds to none, which SGLang must know.
        whole[_TOWER] = {"deepstack_visual_indexes": [], **tower}
    return {**{name: value for name, value in source.items() if name not in _OWN}, **whole}


def _older(config: HfConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"torch_dtype": config["dtype"]} if "dtype" in config else {}
    kinds = config.get("layer_types") or ()
    if "linear_attention" in kinds:
        # SGLang has full attention in each layer that is a multiple of this, by default of 4.
        found["full_attention_interval"] = 1 + (kinds.index(_FULL) if _FULL in kinds else len(kinds))
    rope = config.get("rope_parameters") or {}
    if isinstance(full := rope.get(_FULL), Mapping):
        # Gemma 3 has another base in the layers with a sliding window.
        found["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = full
    if "rope_theta" not in rope:
        return found
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    plain = scaling.keys() <= {"rope_type"} and scaling.get("rope_type", "default") == "default"
    found |= {"rope_theta": rope["rope_theta"], "rope_scaling": None if plain else scaling}
    if "partial_rotary_factor" in rope:
        found["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return found
