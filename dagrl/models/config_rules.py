"""Sizes of a Hugging Face config that go together, or not: what its model would fail with, or compute wrongly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dagrl.models.sizes import is_size, sizes_of


def wrong_combinations(config: Mapping[str, Any]) -> Iterator[str]:
    """Contradictions between the fields of a config, with remedies. Fields that it leaves out do not count."""
    yield from _attention(config)
    yield from _experts(config)
    padding, rows = config.get("pad_token_id"), config.get("vocab_size")
    if isinstance(padding, int) and is_size(rows) and not -rows <= padding < rows:
        yield f"pad_token_id {padding} is none of the {rows} tokens (vocab_size); choose one of them, or null"
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if isinstance(kinds, list) and is_size(layers) and len(kinds) != layers:
        yield f"layer_types names {len(kinds)} layers and num_hidden_layers is {layers}; make them equal"


def _attention(config: Mapping[str, Any]) -> Iterator[str]:
    heads, hidden, groups = (config.get(name) for name in ("num_attention_heads", "hidden_size", "num_key_value_heads"))
    for name in ("head_dim", "qk_rope_head_dim"):
        if is_size(config.get(name)) and config[name] % 2:
            yield f"{name} {config[name]} is odd, and positions are said by turning pairs; choose an even size"
    if "kv_lora_rank" in config:
        return  # Latent attention has heads of sizes of their own.
    # transformers wants it of a Llama whatever its heads' size.
    shares = config.get("head_dim") is None or config.get("model_type") == "llama"
    remedy = "" if config.get("model_type") == "llama" else ", or add head_dim"
    if is_size(heads) and is_size(hidden) and shares and hidden % heads:
        yield f"num_attention_heads {heads} does not divide hidden_size {hidden}; choose a divisor{remedy}"
    elif is_size(heads) and is_size(hidden) and config.get("head_dim") is None and hidden // heads % 2:
        yield (
            f"heads of hidden_size / num_attention_heads = {hidden // heads} are odd, and positions are said by "
            "turning pairs; choose sizes with an even quotient, or add head_dim"
        )
    if is_size(heads) and is_size(groups) and heads % groups:
        yield f"num_key_value_heads {groups} does not divide num_attention_heads {heads}; choose a divisor"


def _experts(config: Mapping[str, Any]) -> Iterator[str]:
    chosen, experts = config.get("num_experts_per_tok"), sizes_of(config).experts
    if not experts:
        return
    if is_size(chosen) and chosen > experts.value:
        yield f"num_experts_per_tok {chosen} is more than {experts.name} {experts.value}; lower it"
        return
    groups, taken = config.get("n_group"), config.get("topk_group")
    if not is_size(groups):
        return
    each = experts.value // groups
    if experts.value % groups:
        yield f"n_group {groups} does not divide {experts.name} {experts.value}; choose a divisor"
    elif each < 2:
        yield f"n_group {groups} leaves {each} expert a group, which is ranked by its best two; lower n_group"
    elif is_size(taken) and taken > groups:
        yield f"topk_group {taken} is more than n_group {groups}; lower it"
    elif is_size(taken) and is_size(chosen) and chosen > taken * each:
        yield f"num_experts_per_tok {chosen} is more than topk_group {taken} groups of {each} experts have; lower it"
