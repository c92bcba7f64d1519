"""The contract of a model family, with the properties of a dense model like Llama as defaults.

A family is one module with a `Family` subclass and an instance of it as ``FAMILY``. It says how a Hugging Face config
becomes a `ModelShape`, from which tensors, parameters and operations follow; which configs the Megatron backend can
train exactly; and the features that inference engines support.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from dagrl.backends.families.config_fields import (
    COMMON_RANGES,
    EXPERT_RANGES,
    ConfigFields,
    HfConfig,
    MegatronFields,
    Range,
    is_size,
)
from dagrl.backends.families.parts import Attention, GatedExperts, GatedMlp, GroupedQueryAttention, LatentAttention
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.families.vision import VisionTower
from dagrl.config.errors import shown
from dagrl.model_files.hf_config import flat_config
from dagrl.model_files.library_classes import config_class

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of ``llama3`` rope scaling that Megatron holds as constants."""
_COMMON_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


class Family:
    """Models of one architecture."""

    model_type: ClassVar[str]
    """The ``model_type`` in Hugging Face's config.json."""

    bridged: ClassVar[bool] = False
    """Whether megatron-bridge's provider builds the Megatron model. `transformer_fields` are then the fields that it
    sets differently, and `rope_arguments` are not used."""
    has_tables: ClassVar[bool] = True
    """Whether the tensors of `shape` are all of a checkpoint, with their places in Megatron. If not, megatron-bridge
    converts the weights."""

    # -- fields of the config

    sizes: ClassVar[tuple[str, ...]] = ()
    """Fields that a config.json must have, beside the usual sizes."""
    expert_count: ClassVar[tuple[str, ...]] = ()
    """Names of the field with the number of experts, the family's own first; empty for dense models."""
    expert_width: ClassVar[str] = "moe_intermediate_size"
    latent: ClassVar[bool] = False
    zero_centred_norms: ClassVar[bool] = False
    """Whether norms multiply with 1 + weight, so that the weights of a new model are zeros."""
    ranges: ClassVar[Mapping[str, Range]] = COMMON_RANGES | EXPERT_RANGES
    heads_divide_hidden: ClassVar[bool] = False
    """Whether transformers requires it for any head_dim."""

    shares_prefixes: ClassVar[bool] = True
    """Whether responses need only the keys and values of their prompt."""
    has_vision: ClassVar[bool] = False

    # -- features that the Megatron backend computes like Hugging Face

    required: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields with the only values that the backend can build, the usual one first. Null means the usual one."""
    activations: ClassVar[tuple[str, ...]] = ("silu",)
    """Activation functions (``hidden_act``, ``hidden_activation``)."""
    layer_kinds: ClassVar[tuple[str, ...]] = ("full_attention",)
    """Kinds of layers (``layer_types``)."""
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "llama3")
    """Kinds of rotary embedding (``rope_type``)."""
    rotates_parts: ClassVar[bool] = False
    """Whether it can rotate a part of each head (``partial_rotary_factor``)."""
    transformer_defaults: ClassVar[MegatronFields] = {}
    """Fields of Megatron's TransformerConfig that suit the family, and that a pipeline file may change."""

    # -- features of inference engines

    reports_routed_experts: ClassVar[bool] = True
    """Whether they can report the experts that each token was sent to."""
    serves_dense_layers: ClassVar[bool] = True
    """Whether they load a mixture with dense layers."""

    def fields(self, config: HfConfig) -> ConfigFields:
        """Return the fields of a config, with the defaults of its class in the installed transformers."""
        return ConfigFields(dict(flat_config(config)), config_class(self.model_type).defaults)

    def is_zero_centred(self, name: str) -> bool:
        """Whether the published tensor `name` is the weight of a norm that multiplies with 1 + weight."""
        return self.zero_centred_norms and name.endswith("norm.weight")

    def attention(self, config: ConfigFields) -> Attention:
        return self.grouped_query_attention(config)

    def grouped_query_attention(
        self, config: ConfigFields, kind: type[GroupedQueryAttention] = GroupedQueryAttention, **options: Any
    ) -> GroupedQueryAttention:
        """Return grouped-query attention under the usual names of its sizes, with `options` such as ``qkv_bias``."""
        hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
        head_dim = config.optional("head_dim") or hidden // heads
        groups = config.optional("num_key_value_heads") or heads
        return kind(hidden, heads, groups, head_dim, **options)

    def latent_attention(self, config: ConfigFields) -> LatentAttention:
        return LatentAttention(
            hidden=config.size("hidden_size"),
            heads=config.size("num_attention_heads"),
            query_rank=config.optional("q_lora_rank"),
            key_rank=config.size("kv_lora_rank"),
            plain_dim=config.size("qk_nope_head_dim"),
            rotary_dim=config.size("qk_rope_head_dim"),
            value_dim=config.size("v_head_dim"),
        )

    def mlp(self, config: ConfigFields) -> GatedMlp:
        return GatedMlp(config.size("hidden_size"), config.size("intermediate_size"))

    def experts(self, config: ConfigFields) -> GatedExperts | None:
        return self.gated_experts(config) if self.expert_count else None

    def gated_experts(
        self, config: ConfigFields, kind: type[GatedExperts] = GatedExperts, **options: Any
    ) -> GatedExperts:
        """Return experts under the usual names of their sizes, with `options` such as ``shared_width``."""
        return kind(
            hidden=config.size("hidden_size"),
            count=config.size(*self.expert_count),
            chosen=config.size("num_experts_per_tok"),
            width=config.size(self.expert_width),
            **options,
        )

    def mixture_layers(self, config: ConfigFields) -> tuple[bool, ...]:
        return (True,) * config.size("num_hidden_layers")

    def vision(self, config: ConfigFields) -> VisionTower | None:
        return None

    def shape(self, config: ConfigFields) -> ModelShape:
        """Return the shape of a model. ValueError for a size that neither the config nor its class says."""
        experts = self.experts(config)
        return ModelShape(
            family=self.model_type,
            hidden=config.size("hidden_size"),
            layers=config.size("num_hidden_layers"),
            vocabulary=config.size("vocab_size"),
            attention=self.attention(config),
            mlp=self.mlp(config),
            experts=experts,
            mixture_layers=self.mixture_layers(config) if experts else (),
            tied=bool(config.get("tie_word_embeddings", False)),
            vision=self.vision(config),
        )

    def transformer_fields(self, config: ConfigFields) -> MegatronFields:
        """Return the fields of Megatron's TransformerConfig that do not follow from the `shape`."""
        return {}

    def rope_arguments(self, config: ConfigFields) -> MegatronFields:
        """Return GPTModel's keyword arguments for the rotary embedding."""
        rope = config["rope_parameters"]
        scaled = rope.get("rope_type", "default") != "default"
        return {
            "rotary_base": rope["rope_theta"],
            **({"rope_scaling": True, "rope_scaling_factor": rope["factor"]} if scaled else {}),
        }

    def sizes_left_out(self, config: HfConfig) -> list[str]:
        """Return the missing sizes of a config.json that have no usable default in its class."""
        needed: list[tuple[str, ...]] = [(name,) for name in (*_COMMON_SIZES, *self.sizes)]
        if self.expert_count:
            needed += [self.expert_count, ("num_experts_per_tok",), (self.expert_width,)]
        return [names[0] for names in needed if all(config.get(name) is None for name in names)]

    def conflicts(self, config: HfConfig) -> Iterator[str]:
        """Yield contradictions between fields, with remedies, for models that would fail or compute wrongly."""
        yield from self.conflicts_of_heads(config)
        chosen = config.get("num_experts_per_tok")
        name = next((name for name in self.expert_count if is_size(config.get(name))), None)
        if name and is_size(chosen) and chosen > config[name]:
            yield f"num_experts_per_tok {chosen} is more than {name} {config[name]}; lower it"
        padding, rows = config.get("pad_token_id"), config.get("vocab_size")
        if isinstance(padding, int) and is_size(rows) and not -rows <= padding < rows:
            yield f"pad_token_id {padding} is none of the {rows} tokens (vocab_size); choose one of them, or null"
        kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
        if isinstance(kinds, list) and is_size(layers) and len(kinds) != layers:
            yield f"layer_types names {len(kinds)} layers and num_hidden_layers is {layers}; make them equal"

    def conflicts_of_heads(self, config: HfConfig) -> Iterator[str]:
        """Yield contradictions between the sizes of attention."""
        if is_size(config.get("kv_lora_rank")):
            return  # In latent attention of an unknown family the sizes of heads are independent.
        heads, hidden, groups, head_dim = (
            config.get(name) for name in ("num_attention_heads", "hidden_size", "num_key_value_heads", "head_dim")
        )
        yield from odd_width(config, "head_dim")
        if is_size(heads) and is_size(hidden):
            if (head_dim is None or self.heads_divide_hidden) and hidden % heads:
                remedy = "" if self.heads_divide_hidden else ", or add head_dim"
                yield f"num_attention_heads {heads} does not divide hidden_size {hidden}; choose a divisor{remedy}"
            elif head_dim is None and hidden // heads % 2:
                yield (
                    f"heads of hidden_size / num_attention_heads = {hidden // heads} are odd, and the rotary embedding "
                    "turns pairs; choose sizes with an even quotient, or add head_dim"
                )
        if is_size(heads) and is_size(groups) and heads % groups:
            yield f"num_key_value_heads {groups} does not divide num_attention_heads {heads}; choose a divisor"

    def unsupported(self, config: ConfigFields) -> Iterator[tuple[str, str]]:
        """Yield fields that the Megatron backend cannot build, or would compute differently, each with the reason.

        Their values are among `ranges`.
        """
        activation = "hidden_activation" if "hidden_activation" in config else "hidden_act"
        for field, options in {activation: self.activations, **self.required}.items():
            # Null, and a field that is left out, mean the usual value in Hugging Face's classes.
            if (value := config.get(field)) is not None and value not in options:
                takes = " or ".join(shown(option) for option in options)
                what = f"{self.model_type} with {field} {shown(value)}"
                yield field, f"the megatron engine has no {what}; it takes {takes}"
        others = sorted(set(config.get("layer_types") or ()) - set(self.layer_kinds))
        if others:
            takes = " or ".join(self.layer_kinds)
            yield "layer_types", f"the megatron engine has no layers of {others[0]}; it takes {takes}"
        field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        yield from ((field, message) for message in self.unsupported_rope(config, config.get(field) or {}))

    def unsupported_rope(self, config: ConfigFields, rope: HfConfig) -> Iterator[str]:
        """Yield properties of a rotary embedding that the Megatron backend would compute differently."""
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in self.rope_kinds:
            known = " or ".join(self.rope_kinds)
            yield f"the megatron engine has no rope scaling of type {shown(kind)}; it knows {known}"
            return
        part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if not self.rotates_parts and part not in (None, 1):
            yield "the megatron engine rotates whole heads only; set partial_rotary_factor to 1"
        if kind == "llama3":
            given = {"original_max_position_embeddings": config.get("max_position_embeddings"), **rope}
            wrong = next((name for name, value in _LLAMA3_ROPE.items() if given.get(name) != value), None)
            if wrong:
                yield (
                    f"megatron has llama3 rope scaling with {wrong} {_LLAMA3_ROPE[wrong]:g} only, and this model has "
                    f"{shown(given.get(wrong))}; it cannot be trained exactly"
                )

    def warnings(self, config: ConfigFields) -> Iterator[tuple[str, str]]:
        """Yield fields whose values train poorly, each with the reason and a remedy."""
        yield from ()


def odd_width(config: HfConfig, name: str) -> Iterator[str]:
    """Report an odd width of a head."""
    if is_size(config.get(name)) and config[name] % 2:
        yield f"{name} {config[name]} is odd, and the rotary embedding turns pairs; choose an even size"


def mixture_after_dense_layers(config: ConfigFields) -> tuple[bool, ...]:
    """Whether each layer is behind the first ``first_k_dense_replace`` ones, which have no experts."""
    first = config.optional("first_k_dense_replace") or 0
    return tuple(layer >= first for layer in range(config.size("num_hidden_layers")))


def weight_of_one_expert(config: ConfigFields) -> Iterator[tuple[str, str]]:
    """Yield the warning for a mixture that normalises the weights of a single chosen expert."""
    if config.get("num_experts_per_tok") == 1:
        message = "the weight of a single chosen expert is always 1, so routers get no gradient and stay as they are"
        yield "num_experts_per_tok", f"{message}; choose 2 or more to train them"
