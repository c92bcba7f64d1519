"""Names and shapes of a model's tensors as published checkpoints have them, computed from the shape of the model.

`dagrl.backends.megatron.engine.families` maps the same names to Megatron's parameters; a test compares both with
transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dagrl.models.shape import ExpertShape, ModelShape

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
SCORE = "score.weight"
"""The head of a critic or reward model, [1, hidden size]."""
DERIVED = ("rotary_emb.inv_freq",)
"""Ends of names that old weight files hold although the config says it all."""
SCALES = ("weight_scale_inv", "weight_scale")
"""Ends of names beside weights that are stored in 8 bits."""
QUANTISED = (*SCALES, ".qweight", ".qzeros", ".weight_packed", ".absmax", ".SCB")
"""Ends of names of quantised weights, as gptq, awq, compressed-tensors, bitsandbytes and fp8 have them."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")

Tensors = Iterator[tuple[str, tuple[int, ...]]]


def published_tensors(shape: ModelShape) -> Tensors:
    """Name and shape of each tensor, layer by layer; an output layer that is tied to the embedding is left out."""
    yield EMBEDDING, (shape.vocabulary, shape.hidden)
    for layer in shape.positions:
        for name, size in _layer(shape, layer):
            yield f"model.layers.{layer}.{name}", size
    yield "model.norm.weight", (shape.hidden,)
    if not shape.tied:
        yield OUTPUT, (shape.vocabulary, shape.hidden)


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to; None for tensors outside the layers."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def is_prediction_layer(name: str, layers: int, prediction_layers: int) -> bool:
    """Whether a tensor is of the layers for multi-token prediction, which follow the model's own `layers`."""
    layer = layer_of(name)
    return layer is not None and 0 <= layer - layers < prediction_layers


def _layer(shape: ModelShape, layer: int) -> Tensors:
    yield "input_layernorm.weight", (shape.hidden,)
    yield from _latent_attention(shape) if shape.latent else _grouped_attention(shape)
    yield "post_attention_layernorm.weight", (shape.hidden,)
    if shape.experts and shape.is_mixture(layer):
        yield from _experts(shape, shape.experts)
    else:
        yield from _mlp("mlp", shape.hidden, shape.dense_width)


def _grouped_attention(shape: ModelShape) -> Tensors:
    rows = {"q": shape.heads * shape.head_dim} | dict.fromkeys("kv", shape.key_value_heads * shape.head_dim)
    for name, size in rows.items():
        yield f"self_attn.{name}_proj.weight", (size, shape.hidden)
        if shape.qkv_bias:
            yield f"self_attn.{name}_proj.bias", (size,)
    yield "self_attn.o_proj.weight", (shape.hidden, rows["q"])
    if shape.qk_norm:
        yield "self_attn.q_norm.weight", (shape.head_dim,)
        yield "self_attn.k_norm.weight", (shape.head_dim,)


def _latent_attention(shape: ModelShape) -> Tensors:
    assert shape.latent is not None
    sizes = shape.latent
    queries = shape.heads * sizes.query_dim
    if sizes.query_rank:
        yield "self_attn.q_a_proj.weight", (sizes.query_rank, shape.hidden)
        yield "self_attn.q_a_layernorm.weight", (sizes.query_rank,)
        yield "self_attn.q_b_proj.weight", (queries, sizes.query_rank)
    else:
        yield "self_attn.q_proj.weight", (queries, shape.hidden)
    yield "self_attn.kv_a_proj_with_mqa.weight", (sizes.key_rank + sizes.rotary_dim, shape.hidden)
    yield "self_attn.kv_a_layernorm.weight", (sizes.key_rank,)
    yield "self_attn.kv_b_proj.weight", (shape.heads * (sizes.plain_dim + sizes.value_dim), sizes.key_rank)
    yield "self_attn.o_proj.weight", (shape.hidden, shape.heads * sizes.value_dim)


def _experts(shape: ModelShape, experts: ExpertShape) -> Tensors:
    block, names = ("block_sparse_moe", ("w1", "w3", "w2")) if shape.family == "mixtral" else ("mlp", _PROJECTIONS)
    yield f"{block}.gate.weight", (experts.count, shape.hidden)
    if experts.biased:
        yield f"{block}.gate.e_score_correction_bias", (experts.count,)
    for expert in range(experts.count):
        yield from _mlp(f"{block}.experts.{expert}", shape.hidden, experts.width, names)
    if experts.shared_width:
        yield from _mlp(f"{block}.shared_experts", shape.hidden, experts.shared_width)


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _mlp(block: str, hidden: int, width: int, names: tuple[str, str, str] = _PROJECTIONS) -> Tensors:
    gate, up, down = names
    yield f"{block}.{gate}.weight", (width, hidden)
    yield f"{block}.{up}.weight", (width, hidden)
    yield f"{block}.{down}.weight", (hidden, width)
