"""Activations: tensors that a forward pass keeps for the backward pass, layer by layer, and temporary tensors of both.

Counted as in "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), for the layers that
Megatron builds with Transformer Engine: rows are packed, fused attention keeps no scores, a gated MLP has three
matrices, and norms keep their input and their output. Sizes are bytes for one token of the rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.planning.stages import Stage
from dagrl.backends.megatron.section import MegatronEngineSpec

_UNEVEN_EXPERTS = 1.25
"""Tokens of the fullest expert-parallel rank over their mean: routers without a balancing loss favour some experts. An
estimate: it depends on the model."""
_RECOMPUTED: dict[str, tuple[str, ...]] = {
    "core_attn": (),
    "layernorm": ("attention norm", "mlp norm"),
    "mlp": ("mlp norm", "mlp up", "mlp act"),
    "moe": ("router", "experts in", "experts up", "experts act", "mlp up", "mlp act"),
    "moe_act": ("experts act",),
    "shared_experts": ("mlp up", "mlp act"),
    "mla_up_proj": ("attention norms", "queries", "keys", "values"),
}
"""Megatron's ``recompute_modules`` -> parts of a layer that are not kept. Recomputing fused attention saves no
memory."""


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Bytes on one rank of a pipeline stage."""

    kept: float
    """By all micro-batches in flight."""
    working: float
    """In addition, while a layer's backward pass runs."""
    forward: float
    """At most, in a forward pass that keeps nothing."""


def value_bytes(engine: MegatronEngineSpec, *, on_gpu: bool) -> int:
    """Return the bytes of a weight or activation: by default bfloat16 on a GPU and float32 without one."""
    return 2 if engine.transformer.get("bf16", on_gpu) is True else 4


def stage_activations(
    shape: ModelShape,
    engine: MegatronEngineSpec,
    stage: Stage,
    tokens: int,
    micro_batches: int,
    *,
    copied_keys: float = 0.0,
    on_gpu: bool = True,
) -> StageActivations:
    """Count micro-batches of `tokens`, padding included, over all context-parallel ranks.

    `copied_keys` is the number of keys in excess of tokens that attention reads if rows share prefixes.
    """
    own = tokens / engine.parallel.cp
    copied = copied_keys * _key_bytes(shape, engine, on_gpu=on_gpu)
    layers = {index: _Layer.of(shape, engine, index, copied / own, on_gpu=on_gpu) for index in stage.layers}
    kept = sum(_kept_of_chunk(engine, [layers[index] for index in chunk]) for chunk in stage.chunks)
    working = max((layer.backward for layer in layers.values()), default=0.0)
    if engine.transformer.get("recompute_granularity") == "full":
        working += _recomputed_at_once(engine) * max((layer.kept for layer in layers.values()), default=0.0)
    return StageActivations(
        kept=kept * own * stage.in_flight(micro_batches),
        working=working * own,
        forward=max((layer.forward for layer in layers.values()), default=0.0) * own,
    )


def _kept_of_chunk(engine: MegatronEngineSpec, layers: list[_Layer]) -> float:
    if engine.transformer.get("recompute_granularity") != "full":
        return sum(layer.kept for layer in layers)
    inputs = layers[0].parts["input"] if layers else 0.0
    number = _layers_of_recompute(engine)
    if engine.transformer.get("recompute_method") == "block":
        return sum(inputs if i < number else layer.kept for i, layer in enumerate(layers))
    return math.ceil(len(layers) / number) * inputs


def _layers_of_recompute(engine: MegatronEngineSpec) -> int:
    return int(engine.transformer.get("recompute_num_layers") or 1)


def _recomputed_at_once(engine: MegatronEngineSpec) -> int:
    return 1 if engine.transformer.get("recompute_method") == "block" else _layers_of_recompute(engine)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Bytes for one token on one rank."""

    parts: dict[str, float]
    """Tensors that the backward pass needs."""
    kept: float
    """The parts that are not recomputed."""
    forward: float
    backward: float
    """Gradients that exist at the same time in the backward pass of the widest part of the layer."""

    @staticmethod
    def of(shape: ModelShape, engine: MegatronEngineSpec, index: int, copied: float, *, on_gpu: bool) -> _Layer:
        sizes = engine.parallel
        tensor = sizes.tp
        value = value_bytes(engine, on_gpu=on_gpu)
        # Tensors between tensor-parallel regions are split only with sequence parallelism.
        between = shape.hidden * value / (tensor if sizes.sequence_parallel else 1)
        parts = {"input": between, "attention norm": between, "residual": between, "mlp norm": between}
        attention = _latent_attention(shape, tensor) if shape.latent else _grouped_attention(shape, tensor)
        parts |= {name: values * value for name, values in attention.items()}
        # The softmax's denominators, float32.
        parts["attention"] = parts.get("attention", 0.0) + 4 * shape.heads / tensor
        parts["copied keys"] = copied
        parts |= dict(_mlp(shape, engine, index, value))
        anew = set(_parts_computed_anew(engine))
        widest = max(
            parts.get("mlp up", 0.0) + parts.get("mlp act", 0.0),
            sum(parts.get(f"experts {part}", 0.0) for part in ("in", "up", "act")),
        )
        whole = shape.hidden * value
        return _Layer(
            parts=parts,
            kept=sum(values for name, values in parts.items() if name not in anew),
            forward=3 * between + whole + max(widest, copied),
            # Gradients of copied keys are added up in float32.
            backward=between + 2 * whole + max(widest, copied * (1 + 4 / value)),
        )


def _parts_computed_anew(engine: MegatronEngineSpec) -> Iterator[str]:
    if engine.transformer.get("recompute_granularity") == "selective":
        for module in engine.transformer.get("recompute_modules") or ("core_attn",):
            yield from _RECOMPUTED.get(str(module), ())


def _key_bytes(shape: ModelShape, engine: MegatronEngineSpec, *, on_gpu: bool) -> float:
    tensor = engine.parallel.tp
    if shape.latent:
        values = shape.heads / tensor * (shape.latent.query_dim + shape.latent.value_dim)
    else:
        values = 2 * math.ceil(shape.key_value_heads / tensor) * shape.head_dim
    return values * value_bytes(engine, on_gpu=on_gpu)


def _grouped_attention(shape: ModelShape, tensor: int) -> dict[str, float]:
    """Count values on one rank. A key head that several ranks share is whole on each of them."""
    queries, keys = shape.heads / tensor * shape.head_dim, math.ceil(shape.key_value_heads / tensor) * shape.head_dim
    return {
        # Norms keep their inputs, rotations nothing.
        "attention norms": (queries + keys) * shape.qk_norm,
        "queries": queries,
        "keys": keys,
        "values": keys,
        "attention": queries,
    }


def _latent_attention(shape: ModelShape, tensor: int) -> dict[str, float]:
    """Count the same for latent attention: each rank computes the latents, and keeps them before and after the norm."""
    assert shape.latent is not None
    sizes, heads = shape.latent, shape.heads / tensor
    return {
        "attention norms": 2 * (sizes.query_rank or 0) + 2 * sizes.key_rank + sizes.rotary_dim,
        # Before and after the rotation of the part with positions; keys are kept expanded and joined.
        "queries": 2 * heads * sizes.query_dim,
        "keys": heads * (sizes.plain_dim + sizes.query_dim),
        "values": 2 * heads * sizes.value_dim,
        "attention": heads * sizes.value_dim,
    }


def _mlp(shape: ModelShape, engine: MegatronEngineSpec, index: int, value: int) -> Iterator[tuple[str, float]]:
    sizes = engine.parallel
    tensor = sizes.tp
    if not shape.is_mixture(index):
        yield "mlp up", 2 * shape.dense_width / tensor * value
        yield "mlp act", shape.dense_width / tensor * value
        return
    assert shape.experts is not None
    experts = shape.experts
    if experts.shared_width:
        yield "mlp up", 2 * experts.shared_width / tensor * value
        yield "mlp act", experts.shared_width / tensor * value
    # Scores, probabilities, and the choice of experts: float32 for every expert.
    yield "router", 4 * 4 * experts.count / tensor
    # A rank's share of the tokens, once for each chosen expert. Expert-tensor-parallel ranks also hold each other's.
    choices = experts.chosen / tensor * (_UNEVEN_EXPERTS if sizes.ep > 1 else 1)
    yield "experts in", choices * sizes.etp * shape.hidden * value
    yield "experts up", choices * 2 * experts.width * value
    yield "experts act", choices * experts.width * value
