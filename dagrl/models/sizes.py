"""The few sizes of a model that a layout has to fit, out of its Hugging Face config as plain JSON.

Families name them differently. What a config does not say is not guessed: Hugging Face's class would have a default,
and only the engine asks that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from typing_extensions import TypeIs

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_DENSE_FAMILIES = ("llama", "qwen2", "qwen3")


class Size(NamedTuple):
    """A size by the name that the config has for it."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model; None is what its config does not say."""

    family: str | None = None
    """Its ``model_type``."""
    layers: Size | None = None
    heads: Size | None = None
    key_value_heads: Size | None = None
    """Of latent attention, which has none, None too."""
    dense_width: Size | None = None
    """Of the layers without experts, if the model is known to have any."""
    expert_width: Size | None = None
    shared_width: Size | None = None
    """Of the experts that see every token."""
    experts: Size | None = None
    positions: Size | None = None
    vocabulary: Size | None = None
    mixture: bool | None = None
    """Whether it is a mixture of experts."""
    latent_attention: bool = False


def sizes_of(config: Mapping[str, Any] | None) -> ModelSizes:
    """The sizes that a config says; of None, which stands for one that cannot be read, none."""
    config = config or {}
    experts = next((size for key in _EXPERTS if (size := _size(config, key))), None)
    mixture = True if experts else False if config.get("model_type") in _DENSE_FAMILIES else None
    if any(word in str(config.get("model_type")) for word in ("_moe", "mixtral", "deepseek_v")):
        mixture = True
    latent = is_size(config.get("kv_lora_rank")) or str(config.get("model_type")).startswith("deepseek_v")
    width = _size(config, "intermediate_size")
    return ModelSizes(
        family=str(config["model_type"]) if config.get("model_type") else None,
        layers=_size(config, "num_hidden_layers"),
        heads=_size(config, "num_attention_heads"),
        key_value_heads=None if latent else _size(config, "num_key_value_heads"),
        dense_width=width if not mixture or _has_dense_layers(config) else None,
        expert_width=width if config.get("model_type") == "mixtral" else _size(config, "moe_intermediate_size"),
        shared_width=_shared_width(config),
        experts=experts,
        positions=_size(config, "max_position_embeddings"),
        vocabulary=_size(config, "vocab_size"),
        mixture=mixture,
        latent_attention=latent,
    )


def is_size(value: Any) -> TypeIs[int]:
    """Whether a value can be a size."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _size(config: Mapping[str, Any], key: str) -> Size | None:
    value = config.get(key)
    return Size(key, value) if is_size(value) else None


def _has_dense_layers(config: Mapping[str, Any]) -> bool:
    """Whether a mixture is known to have layers without experts."""
    first, every = config.get("first_k_dense_replace"), config.get("decoder_sparse_step")
    return is_size(first) or bool(config.get("mlp_only_layers")) or (is_size(every) and every > 1)


def _shared_width(config: Mapping[str, Any]) -> Size | None:
    if size := _size(config, "shared_expert_intermediate_size"):
        return size
    shared, width = _size(config, "n_shared_experts"), _size(config, "moe_intermediate_size")
    if shared and width:
        return Size("n_shared_experts * moe_intermediate_size", shared.value * width.value)
    return None
