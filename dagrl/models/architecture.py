"""Config fields that the megatron engine cannot build, or would compute otherwise than Hugging Face.

`dagrl validate` asks before a run, of config.json or ``model.init``; the engine asks once more, of the config that it
builds from. `families.py` has the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dagrl.config.errors import shown
from dagrl.models.families import LLAMA3_ROPE, REQUIRED, ROPE_KINDS
from dagrl.models.sizes import is_size


def unsupported(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Fields of the config of one of `FAMILIES` that the engine does not take, each with the reason.

    `config` has single values that they can have (`config_fields`), and the defaults of its class.
    """
    family = config["model_type"]
    for field, options in REQUIRED[family].items():
        # Null, and a field that is left out, mean the usual in Hugging Face's classes.
        if (value := config.get(field)) is not None and value not in options:
            takes = " or ".join(shown(option) for option in options)
            yield field, f"the megatron engine has no {family} with {field} {shown(value)}; it takes {takes}"
    others = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if others:
        yield "layer_types", f"the megatron engine has no layers of {others[0]}; it takes full_attention"
    yield from _rope(family, config)
    if family == "qwen3_moe":
        yield from _qwen3_moe(config)
    elif family == "deepseek_v3":
        yield from _deepseek_v3(config)


def _rope(family: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(field) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS[family]:
        known = " or ".join(ROPE_KINDS[family])
        yield field, f"the megatron engine has no rope scaling of type {shown(kind)}; it knows {known}"
        return
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1):
        yield field, "the megatron engine rotates whole heads only; set partial_rotary_factor to 1"
    if kind == "llama3":
        given = {"original_max_position_embeddings": config.get("max_position_embeddings"), **rope}
        wrong = next((name for name, value in LLAMA3_ROPE.items() if given.get(name) != value), None)
        if wrong:
            message = f"megatron has llama3 rope scaling with {wrong} {LLAMA3_ROPE[wrong]:g} only"
            yield field, f"{message}, and this model has {shown(given.get(wrong))}; it cannot be trained exactly"
    elif kind == "yarn":
        if rope.get("attention_factor") is not None or rope.get("truncate", True) is not True:
            yield field, "megatron's yarn has neither attention_factor nor truncate: false; take them out"
        elif rope.get("mscale_all_dim") and not rope.get("mscale"):
            yield field, "megatron's yarn reads mscale_all_dim together with mscale only; add mscale"


def _qwen3_moe(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    layers, every = config.get("num_hidden_layers"), config.get("decoder_sparse_step") or 1
    dense = config.get("mlp_only_layers") or ()
    if is_size(layers) and all(layer in dense or (layer + 1) % every for layer in range(layers)):
        message = "this qwen3_moe has no layer with experts; write it as qwen3, or change decoder_sparse_step"
        yield ("decoder_sparse_step" if every > 1 else "mlp_only_layers"), message


def _deepseek_v3(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    groups, taken, chosen = (config.get(name) or 1 for name in ("n_group", "topk_group", "num_experts_per_tok"))
    if taken < groups and chosen // taken != 2:
        yield (
            "topk_group",
            f"megatron ranks groups of experts by the sum of their best {chosen // taken} experts "
            "(num_experts_per_tok / topk_group), and this model by their best 2; it cannot be trained exactly",
        )
    normalised = bool(config.get("norm_topk_prob"))
    if normalised != (chosen > 1):
        yield (
            "norm_topk_prob",
            "megatron normalises the weights of chosen experts if there are several, and leaves that of a single one; "
            f"this model has norm_topk_prob {shown(normalised)} with num_experts_per_tok {chosen}, and cannot be "
            "trained exactly",
        )
    first, layers = config.get("first_k_dense_replace") or 0, config.get("num_hidden_layers")
    if is_size(layers) and first >= layers:
        yield (
            "first_k_dense_replace",
            f"this deepseek_v3 has no layer with experts: {first} of {layers} layers are dense; lower it",
        )
