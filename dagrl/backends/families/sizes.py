"""Sizes of a model that restrict its layout, from its Hugging Face config.

A config may omit sizes, or belong to an unknown family: such sizes are None, and are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from dagrl.backends.families.base import Family
from dagrl.backends.families.config_fields import ConfigFields, HfConfig, is_size
from dagrl.backends.families.gated_delta import LINEAR, linear_layers
from dagrl.backends.families.registry import UNKNOWN, find_family


class Size(NamedTuple):
    """A size with its name in the config."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model; None if its config does not give them."""

    family: str | None = None
    traits: Family = UNKNOWN
    """Its family, or a placeholder for an unknown one."""
    layers: Size | None = None
    heads: Size | None = None
    key_value_heads: Size | None = None
    """Heads of keys and values; None also for latent attention."""
    linear_heads: Size | None = None
    """Heads of keys of gated delta nets."""
    linear_layers: tuple[bool, ...] = ()
    """For each layer, whether it has a gated delta net."""
    dense_width: Size | None = None
    """Width of the layers without experts, if the model has any."""
    expert_width: Size | None = None
    shared_width: Size | None = None
    """Total width of the shared experts."""
    experts: Size | None = None
    positions: Size | None = None
    window: Size | None = None
    """Tokens that attention reaches back, in all layers or some."""
    vocabulary: Size | None = None
    mixture: bool | None = None
    latent_attention: bool = False
    has_vision: bool = True
    added_layers: int = 0
    """Number of layers to whose outputs the tower adds."""
    norms_outputs: bool = False
    """Whether norms follow the blocks of a layer."""
    capped_logits: bool = False


def sizes_of(config: HfConfig | None) -> ModelSizes:
    """Return the sizes in a config; no sizes for None, an unreadable config."""
    config = config or {}
    family = find_family(config.get("model_type"))
    traits = family or UNKNOWN
    fields = family.fields(config) if family else ConfigFields(dict(config))
    tower, mlp = _if_known(lambda: traits.vision(fields)), _if_known(lambda: traits.mlp(fields))

    def size(name: str) -> Size | None:
        value = config.get(name)
        return Size(name, value) if is_size(value) else None

    experts = next((found for name in traits.expert_count if (found := size(name))), None)
    mixture = bool(family.expert_count) if family else True if experts else None
    mixture_layers = (_if_known(lambda: family.mixture_layers(fields)) if family and mixture else None) or ()
    latent = traits.latent or is_size(config.get("kv_lora_rank"))
    shared, width = size("n_shared_experts"), size(traits.expert_width)
    product = "n_shared_experts * moe_intermediate_size"
    shared_width = Size(product, shared.value * width.value) if shared and width else None
    return ModelSizes(
        family=str(config["model_type"]) if config.get("model_type") else None,
        traits=traits,
        layers=size("num_hidden_layers"),
        heads=size("num_attention_heads"),
        key_value_heads=None if latent else size("num_key_value_heads"),
        linear_heads=size("linear_num_key_heads"),
        linear_layers=_if_known(lambda: linear_layers(fields)) or () if LINEAR in traits.layer_kinds else (),
        dense_width=size("intermediate_size") if not mixture or not all(mixture_layers) else None,
        expert_width=width if mixture is not False else None,
        shared_width=size("shared_expert_intermediate_size") or shared_width,
        experts=experts,
        positions=size("max_position_embeddings"),
        window=Size("sliding_window", window) if is_size(window := fields.get("sliding_window")) else None,
        vocabulary=size("vocab_size"),
        mixture=mixture,
        latent_attention=latent,
        has_vision=traits.has_vision if family else "vision_config" in config,
        added_layers=len(tower.extra_layers) if tower else 0,
        norms_outputs=mlp is not None and bool(mlp.post_norm),
        capped_logits=family is not None and bool(fields.get("final_logit_softcapping")),
    )


def _if_known[Answer](answer: Callable[[], Answer]) -> Answer | None:
    try:
        return answer()
    except ValueError:
        return None
