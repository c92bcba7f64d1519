"""The shape of a model, out of its Hugging Face config: all that its memory and its operations follow from.

Plain arithmetic on the config's fields. What a config leaves out is what its class in the installed transformers says,
read as text: importing transformers takes seconds, and planning none.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dagrl.config.schema import ModelSpec, Pipeline
from dagrl.models.config_class import model_defaults
from dagrl.models.families import FAMILIES
from dagrl.models.hf_config import read_config
from dagrl.models.sizes import is_size

GATED_MLP_MATRICES = 3
"""Gate, up and down: the MLP of all these families."""


_NEEDED_SIZES = tuple(
    (name,) for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
)
_MIXTURE = (("num_experts_per_tok",), ("moe_intermediate_size",))
_SIZES_OF_FAMILIES: dict[Any, tuple[tuple[str, ...], ...]] = {
    "mixtral": (("num_local_experts", "num_experts"), ("num_experts_per_tok",)),
    "qwen3_moe": (("num_experts", "num_local_experts"), *_MIXTURE),
    "deepseek_v3": (
        *(("n_routed_experts", "num_local_experts"), *_MIXTURE),
        *(("kv_lora_rank",), ("qk_nope_head_dim",), ("qk_rope_head_dim",), ("v_head_dim",)),
    ),
}
"""Sizes that configs of a family say beside the common ones, with the other names that they may have."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Multi-head latent attention ("DeepSeek-V2", arXiv 2405.04434, section 2.1)."""

    query_rank: int | None
    """Width of the compressed queries; None where queries are not compressed."""
    key_rank: int
    """Width of the compressed keys and values."""
    plain_dim: int
    """Of a head's query and key: the part without positions."""
    rotary_dim: int
    """Of a head's query and key: the part with positions, which all heads share of the key."""
    value_dim: int
    """Of a head's value."""

    @property
    def query_dim(self) -> int:
        """Width of a head's query."""
        return self.plain_dim + self.rotary_dim


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of a mixture's layer."""

    count: int
    """Routed experts."""
    chosen: int
    """Experts that each token is sent to."""
    width: int
    """Of one routed expert."""
    shared_width: int = 0
    """Of the experts that see every token, together."""
    biased: bool = False
    """Whether the router has a bias that only chooses: a float32 buffer that no gradient moves."""


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """Parameters of one layer, by how tensor-parallel ranks hold them."""

    attention: int
    """Matrices and biases of attention that the ranks share out."""
    mlp: int
    """Those of the dense MLP, or of the experts that see every token."""
    experts: int
    """Those of all routed experts, shared out over expert-parallel ranks."""
    whole: int
    """What every rank holds: norms, the router, the matrices that compress."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.attention + self.mlp + self.experts + self.whole


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a causal language model; widths and counts of one layer, unless said otherwise."""

    family: str
    """Its ``model_type``."""
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    """Width of a head; with latent attention that of its value."""
    dense_width: int
    """Of the MLP in layers without experts."""
    vocabulary: int
    """Rows of the embedding, as published: without padding."""
    tied: bool = False
    """Whether the output layer is the embedding."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normed, head by head."""
    latent: LatentShape | None = None
    experts: ExpertShape | None = None
    mixture_layers: tuple[bool, ...] = ()
    """Which layers have experts; empty for none."""

    @property
    def positions(self) -> range:
        """The layers, from the first to the last."""
        return range(self.layers)

    def is_mixture(self, layer: int) -> bool:
        """Whether that layer has experts."""
        return self.experts is not None and self.mixture_layers[layer]

    def layer(self, index: int) -> LayerParameters:
        """Parameters of that layer."""
        attention, whole = self._latent_attention() if self.latent else self._grouped_attention()
        # The norms before attention and before the MLP.
        whole += 2 * self.hidden
        if not self.is_mixture(index):
            return LayerParameters(attention, GATED_MLP_MATRICES * self.hidden * self.dense_width, 0, whole)
        assert self.experts is not None
        return LayerParameters(
            attention,
            mlp=GATED_MLP_MATRICES * self.hidden * self.experts.shared_width,
            experts=GATED_MLP_MATRICES * self.hidden * self.experts.width * self.experts.count,
            whole=whole + self.hidden * self.experts.count,
        )

    @property
    def embedding(self) -> int:
        """Parameters of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def output(self) -> int:
        """Parameters of the output layer that are not the embedding's."""
        return 0 if self.tied else self.embedding

    @property
    def final_norm(self) -> int:
        """Parameters of the norm after the last layer."""
        return self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, each counted once."""
        layers = sum(self.layer(index).total for index in self.positions)
        return self.embedding + layers + self.final_norm + self.output

    @property
    def active_parameters(self) -> int:
        """Those that one token meets: of a mixture, the experts that it is sent to."""
        if self.experts is None:
            return self.parameters
        chosen = replace(self.experts, count=self.experts.chosen)
        routers = sum(self.mixture_layers) * self.hidden * (self.experts.count - self.experts.chosen)
        return replace(self, experts=chosen).parameters + routers

    @property
    def cache_values_per_token(self) -> int:
        """Values that attention of one layer keeps for each token: keys and values, or what they are expanded from."""
        if self.latent:
            return self.latent.key_rank + self.latent.rotary_dim
        return 2 * self.key_value_heads * self.head_dim

    def _grouped_attention(self) -> tuple[int, int]:
        """Parameters that ranks share, and those that each holds."""
        queries, keys = self.heads * self.head_dim, self.key_value_heads * self.head_dim
        projections = self.hidden * (2 * queries + 2 * keys)
        return projections + (queries + 2 * keys) * self.qkv_bias, 2 * self.head_dim * self.qk_norm

    def _latent_attention(self) -> tuple[int, int]:
        assert self.latent is not None
        sizes = self.latent
        queries = self.heads * sizes.query_dim
        shared = (sizes.query_rank or self.hidden) * queries
        shared += sizes.key_rank * self.heads * (sizes.plain_dim + sizes.value_dim)
        shared += self.heads * sizes.value_dim * self.hidden
        # What compresses, and the norm of what is compressed.
        whole = self.hidden * (sizes.key_rank + sizes.rotary_dim) + sizes.key_rank
        if sizes.query_rank:
            whole += self.hidden * sizes.query_rank + sizes.query_rank
        return shared, whole


def model_shape(model: ModelSpec) -> ModelShape:
    """The shape of the pipeline's model. ValueError where it cannot be known, with what would help."""
    return shape_of(read_config(model))


def engine_shape(pipeline: Pipeline, engine: str, shape: ModelShape) -> ModelShape:
    """The shape of an engine's model, where that of the pipeline's is `shape`. ValueError as `model_shape`."""
    return shape if pipeline.model_section(engine) == ("model",) else model_shape(pipeline.model_of(engine))


def sizes_left_out(config: Mapping[str, Any]) -> list[str]:
    """Sizes that a folder's config must say and does not; its class would put those of another model in their place."""
    family = config.get("model_type")
    needed = _NEEDED_SIZES + _SIZES_OF_FAMILIES.get(family, ()) if family in FAMILIES else ()
    return [names[0] for names in needed if all(config.get(name) is None for name in names)]


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that the fields of a Hugging Face config describe. ValueError for a family that is not known here, or
    a size that neither the config nor its class says.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"there is no estimate for model type {family!r}: its layers are not known; known are {', '.join(FAMILIES)}"
        )
    fields = _Fields(ChainMap(dict(config), model_defaults(family)))
    latent = _latent(fields) if family == "deepseek_v3" else None
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    experts = _experts(fields)
    return ModelShape(
        family=family,
        layers=fields.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        key_value_heads=fields.optional("num_key_value_heads") or heads,
        head_dim=latent.value_dim if latent else fields.optional("head_dim") or hidden // heads,
        dense_width=fields.size("intermediate_size"),
        vocabulary=fields.size("vocab_size"),
        tied=bool(fields.values.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        latent=latent,
        experts=experts,
        mixture_layers=_mixture_layers(fields) if experts else (),
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """Fields of a config, with the defaults of its class."""

    values: ChainMap[str, Any]

    def size(self, *names: str) -> int:
        """A whole number above 0, under one of these names; what the config says goes before what its class says."""
        for source in self.values.maps:
            for name in names:
                if source.get(name) is not None:
                    if not is_size(source[name]):
                        raise ValueError(f"the model's config says {name}: {source[name]!r}, which is no size")
                    return int(source[name])
        raise ValueError(f"the model's config does not say {names[0]}; add it")

    def optional(self, name: str) -> int | None:
        """The same for a size that there may not be: where the config says null, none."""
        return int(self.values[name]) if is_size(self.values.get(name)) else None


def _latent(fields: _Fields) -> LatentShape:
    return LatentShape(
        query_rank=fields.optional("q_lora_rank"),
        key_rank=fields.size("kv_lora_rank"),
        plain_dim=fields.size("qk_nope_head_dim"),
        rotary_dim=fields.size("qk_rope_head_dim"),
        value_dim=fields.size("v_head_dim"),
    )


def _experts(fields: _Fields) -> ExpertShape | None:
    match fields.values["model_type"]:
        case "mixtral":
            count, width = fields.size("num_local_experts", "num_experts"), fields.size("intermediate_size")
            return ExpertShape(count, fields.size("num_experts_per_tok"), width)
        case "qwen3_moe":
            count, width = fields.size("num_experts", "num_local_experts"), fields.size("moe_intermediate_size")
            return ExpertShape(count, fields.size("num_experts_per_tok"), width)
        case "deepseek_v3":
            count, width = fields.size("n_routed_experts", "num_local_experts"), fields.size("moe_intermediate_size")
            shared = (fields.optional("n_shared_experts") or 0) * width
            return ExpertShape(count, fields.size("num_experts_per_tok"), width, shared, biased=True)
    return None


def _mixture_layers(fields: _Fields) -> tuple[bool, ...]:
    layers = range(fields.size("num_hidden_layers"))
    match fields.values["model_type"]:
        case "qwen3_moe":
            dense, every = fields.values.get("mlp_only_layers") or (), fields.optional("decoder_sparse_step") or 1
            return tuple(layer not in dense and (layer + 1) % every == 0 for layer in layers)
        case "deepseek_v3":
            first = fields.optional("first_k_dense_replace") or 0
            return tuple(layer >= first for layer in layers)
    return tuple(True for _ in layers)
