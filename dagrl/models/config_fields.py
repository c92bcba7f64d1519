"""Values of single fields of a Hugging Face config: what each can be, in ``model.init`` and in config.json alike.

`_KINDS` says the range of the fields that models compute with. The config class of the installed transformers says the
type of all the others, and which fields may be null; it refuses anything else when an engine reads the config.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from dagrl.config.errors import shown

_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, slots=True)
class _Kind:
    """The values that a field can hold."""

    words: str
    holds: Callable[[Any], bool]


def _whole(low: int, high: int) -> _Kind:
    return _Kind(f"a whole number from {low} to {high}", lambda value: _is_whole(value) and low <= value <= high)


def _number(words: str, holds: Callable[[float], bool]) -> _Kind:
    return _Kind(words, lambda value: _is_number(value) and math.isfinite(value) and holds(value))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    # The bound: a larger whole number has no float.
    return isinstance(value, float) or (_is_whole(value) and abs(value) < 10**300)


_WIDTH = _whole(1, 2**21)
_HEADS = _whole(1, 2**14)
_COUNT = _whole(1, 2**16)
_ABOVE_ZERO = _number("a number above 0", lambda value: value > 0)
_SHARE = _number("a number from 0 to 1", lambda value: 0 <= value <= 1)
_NOT_NEGATIVE = _number("a number of 0 or more", lambda value: value >= 0)
_ROPE = _Kind("a mapping, or null", lambda value: isinstance(value, Mapping))
_DTYPE = _Kind(f"a number format ({', '.join(_DTYPES[:4])})", lambda value: value in _DTYPES)
_LABELS = _Kind(
    "a mapping from whole numbers to labels",
    lambda value: isinstance(value, Mapping) and all(str(key).isdecimal() for key in value),
)
_LAYERS = _Kind("a list of layers' numbers", lambda value: isinstance(value, list) and all(map(_is_whole, value)))

_KINDS: dict[str, _Kind] = {
    # Far above any model that has been trained, and far below what a run, or a plan, would not survive.
    "hidden_size": _whole(1, 2**18),
    "num_hidden_layers": _whole(1, 10_000),
    "vocab_size": _whole(1, 2**24),
    "max_position_embeddings": _whole(1, 10**8),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), _WIDTH),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), _HEADS),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _HEADS),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), _whole(1, 2**18)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), _COUNT),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "decoder_sparse_step"), _COUNT),
    "first_k_dense_replace": _whole(0, 10_000),
    "mlp_only_layers": _LAYERS,
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "routed_scaling_factor"), _ABOVE_ZERO),
    **dict.fromkeys(("initializer_range", "attention_dropout"), _SHARE),
    **dict.fromkeys(("router_aux_loss_coef", "router_jitter_noise"), _NOT_NEGATIVE),
    "sliding_window": _whole(1, 2**31 - 1),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _ROPE),
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPE),
    "id2label": _LABELS,
}
"""Field -> what it can be. Null is left to the config class."""
_NEVER_NULL = ("rope_theta", "v_head_dim", "num_experts_per_tok", "n_group", "topk_group", "first_k_dense_replace")
"""Fields that models cannot do without, though their class allows null, or does not declare them."""
_ROPE_KINDS: dict[str, _Kind] = {
    "rope_theta": _ABOVE_ZERO,
    "factor": _number("a number of 1 or more", lambda value: value >= 1),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), _ABOVE_ZERO),
    **dict.fromkeys(("mscale", "mscale_all_dim", "attention_factor"), _NOT_NEGATIVE),
    "partial_rotary_factor": _number("a number above 0, at most 1", lambda value: 0 < value <= 1),
    "original_max_position_embeddings": _whole(1, 10**8),
    "truncate": _Kind("true or false", lambda value: isinstance(value, bool)),
    **dict.fromkeys(("rope_type", "type"), _Kind("text", lambda value: isinstance(value, str))),
}
"""The same for ``rope_parameters``, which older files call ``rope_scaling``."""
_NULL_IN_ROPE = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
_NEEDED_BY_ROPE = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
}
"""Kind of rotary embedding -> what else its parameters have to say."""


_WORDS = {
    "int": "a whole number",
    "float": "a number with a decimal point",
    "bool": "true or false",
    "str": "text",
    "None": "null",
    "list[int]": "a list of whole numbers",
    "list[str]": "a list of text",
}


def wrong_values(config: Mapping[str, Any], types: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Fields of a config with a value that they cannot have, each with what was expected and what is there.

    `types`: fields of the config class -> their types as written there; those of a class that is not known are empty.
    """
    for field, value in config.items():
        kind, annotation = _KINDS.get(field), types.get(field)
        # Models ask for an undeclared head_dim with a default, which null is not.
        needed = field in _NEVER_NULL or (field == "head_dim" and annotation == "Any")
        if kind is not None and (value is not None or needed) and not kind.holds(value):
            yield field, f"expected {kind.words}, got {shown(value)}"
        elif annotation is not None and not _allows(annotation, value):
            words = kind.words if kind is not None and value is None else _words(annotation, value)
            yield field, f"expected {words}, got {shown(value)}"
        elif kind is _ROPE and value:
            yield from ((field, message) for message in _wrong_rope(value))


def _wrong_rope(rope: Mapping[str, Any]) -> Iterator[str]:
    for name, value in rope.items():
        kind = _ROPE_KINDS.get(str(name))
        if kind is not None and not (value is None and name in _NULL_IN_ROPE) and not kind.holds(value):
            yield f"expected {kind.words} for `{name}`, got {shown(value)}"
            return
    kind_name = rope.get("rope_type", rope.get("type", "default"))
    missing = [name for name in _NEEDED_BY_ROPE.get(kind_name, ()) if name not in rope]
    if missing:
        yield f"lacks `{missing[0]}`, which {kind_name} needs"


def _allows(annotation: str, value: Any) -> bool:
    return any(allowed(value) for allowed in _parsed(annotation))


def _words(annotation: str, value: Any) -> str:
    if annotation == "float" and _is_whole(value):
        return "a number with a decimal point, which transformers insists on"
    return " or ".join(_WORDS.get(part.strip(), part.strip()) for part in annotation.split("|"))


@cache
def _parsed(annotation: str) -> tuple[Callable[[Any], bool], ...]:
    """Tests of a value, one for each member of a union; transformers checks plain types as strictly as these do."""
    try:
        return tuple(_members(ast.parse(annotation, mode="eval").body))
    except SyntaxError:
        return (lambda value: True,)


def _members(node: ast.expr) -> Iterator[Callable[[Any], bool]]:
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _members(left)
            yield from _members(right)
        case ast.Subscript(value=ast.Name(id="Union" | "Optional" as name), slice=inner):
            for member in inner.elts if isinstance(inner, ast.Tuple) else [inner]:
                yield from _members(member)
            if name == "Optional":
                yield lambda value: value is None
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            options = ast.literal_eval(inner)
            yield lambda value: value in (options if isinstance(options, tuple) else (options,))
        case ast.Subscript(value=ast.Name(id="list"), slice=inner):
            tests = tuple(_members(inner))
            yield lambda value: isinstance(value, list) and all(any(test(each) for test in tests) for each in value)
        case ast.Subscript(value=ast.Name(id="dict")) | ast.Name(id="dict"):
            yield lambda value: isinstance(value, Mapping)
        case ast.Constant(value=None):
            yield lambda value: value is None
        case ast.Name(id="int"):
            yield _is_whole
        case ast.Name(id="float"):
            yield lambda value: isinstance(value, float)
        case ast.Name(id="bool"):
            yield lambda value: isinstance(value, bool)
        case ast.Name(id="str"):
            yield lambda value: isinstance(value, str)
        case _:
            yield lambda value: True
