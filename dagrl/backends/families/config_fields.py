"""Fields of a Hugging Face config: read with the defaults of its class, and checked one by one.

A `Range` gives the possible values of a field. The config class of the installed transformers gives the types of all
other fields, and the fields that may be null; it rejects anything else when an engine reads the config.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import TypeIs

from dagrl.config.errors import shown
from dagrl.model_files.library_classes import has_type, is_whole, words_of_type

type HfConfig = Mapping[str, Any]
"""A Hugging Face config, or a section of it, as read from JSON."""
type MegatronFields = dict[str, Any]
"""Fields of Megatron's configs, or arguments of its models."""


class ConfigFields(ChainMap[str, Any]):
    """Fields of a config, with the defaults of its class as a fallback."""

    def size(self, *names: str) -> int:
        """Return a size under one of these names; the config precedes its class. ValueError without one."""
        for source in self.maps:
            for name in names:
                if source.get(name) is not None:
                    if not is_size(source[name]):
                        raise ValueError(f"the model's config says {name}: {source[name]!r}, which is no size")
                    return int(source[name])
        raise ValueError(f"the model's config does not say {names[0]}; add it")

    def optional(self, name: str) -> int | None:
        """Return an optional size; None if the config has null, or anything but a size."""
        value = self.get(name)
        return value if is_size(value) else None


def is_size(value: object) -> TypeIs[int]:
    """Whether a value is a whole number above 0."""
    return isinstance(value, int) and is_whole(value) and value > 0


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a field can have."""

    words: str
    holds: Callable[[Any], bool]
    nullable: bool = True
    """Whether the config class handles null; otherwise models require the field."""


def whole(low: int, high: int, *, nullable: bool = True) -> Range:
    return Range(
        f"a whole number from {low} to {high}", lambda value: is_whole(value) and low <= value <= high, nullable
    )


def number(words: str, holds: Callable[[float], bool], *, nullable: bool = True) -> Range:
    return Range(words, lambda value: _is_number(value) and math.isfinite(value) and holds(value), nullable)


def _is_number(value: object) -> TypeIs[float]:
    # The bound excludes whole numbers that are too large for a float.
    return isinstance(value, float) or (isinstance(value, int) and is_whole(value) and abs(value) < 10**300)


# The bounds are far above any trained model, and far below sizes that would break a run or a plan.
WIDTH = whole(1, 2**21)
RANK = whole(1, 2**18)
HEADS = whole(1, 2**14)
COUNT = whole(1, 2**16)
LAYERS = whole(0, 10_000, nullable=False)
LAYER_NUMBERS = Range("a list of layers' numbers", lambda value: isinstance(value, list) and all(map(is_whole, value)))
ABOVE_ZERO = number("a number above 0", lambda value: value > 0)
NOT_NEGATIVE = number("a number of 0 or more", lambda value: value >= 0)
_SHARE = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
_POSITIONS = whole(1, 10**8)
_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_DTYPE = Range(f"a number format ({', '.join(_DTYPES[:4])})", lambda value: value in _DTYPES)
_ROPE = Range("a mapping, or null", lambda value: isinstance(value, Mapping))
_LABELS = Range(
    "a mapping from whole numbers to labels",
    lambda value: isinstance(value, Mapping) and all(str(key).isdecimal() for key in value),
)

COMMON_RANGES: dict[str, Range] = {
    "hidden_size": whole(1, 2**18),
    "num_hidden_layers": whole(1, 10_000),
    "vocab_size": whole(1, 2**24),
    "max_position_embeddings": _POSITIONS,
    "intermediate_size": WIDTH,
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), HEADS),
    **dict.fromkeys(("rms_norm_eps", "norm_eps"), ABOVE_ZERO),
    "rope_theta": number("a number above 0", lambda value: value > 0, nullable=False),
    **dict.fromkeys(("initializer_range", "attention_dropout"), _SHARE),
    "sliding_window": whole(1, 2**31 - 1),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _ROPE),
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPE),
    "id2label": _LABELS,
}
EXPERT_RANGES: dict[str, Range] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), COUNT),
    "num_experts_per_tok": whole(1, 2**16, nullable=False),
    "moe_intermediate_size": WIDTH,
    **dict.fromkeys(("router_aux_loss_coef", "router_jitter_noise"), NOT_NEGATIVE),
}
_ROPE_RANGES: dict[str, Range] = {
    "rope_theta": ABOVE_ZERO,
    "factor": number("a number of 1 or more", lambda value: value >= 1),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), ABOVE_ZERO),
    **dict.fromkeys(("mscale", "mscale_all_dim", "attention_factor"), NOT_NEGATIVE),
    "partial_rotary_factor": number("a number above 0, at most 1", lambda value: 0 < value <= 1),
    "original_max_position_embeddings": _POSITIONS,
    "truncate": Range("true or false", lambda value: isinstance(value, bool)),
    **dict.fromkeys(("rope_type", "type"), Range("text", lambda value: isinstance(value, str))),
}
"""Ranges of ``rope_parameters``, which older files call ``rope_scaling``."""
_NULL_IN_ROPE = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
_NEEDED_BY_ROPE = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
}
"""Kind of rotary embedding -> its required parameters."""


def wrong_values(config: HfConfig, types: Mapping[str, str], ranges: Mapping[str, Range]) -> Iterator[tuple[str, str]]:
    """Yield the fields of a config with an invalid value, each with the expected values and the actual one.

    `types` maps fields of the config class to their types as written there; it is empty for an unknown class.
    """
    for field, value in config.items():
        known, annotation = ranges.get(field), types.get(field)
        # Models read an undeclared head_dim with a default, which does not replace null.
        needed = known is not None and (not known.nullable or (field == "head_dim" and annotation == "Any"))
        if known is not None and (value is not None or needed) and not known.holds(value):
            yield field, f"expected {known.words}, got {shown(value)}"
        elif annotation is not None and not has_type(annotation, value):
            words = known.words if known is not None and value is None else words_of_type(annotation)
            if annotation == "float" and is_whole(value):
                words += ", which transformers insists on"
            yield field, f"expected {words}, got {shown(value)}"
        elif known is _ROPE and value:
            yield from ((field, message) for message in _wrong_rope(value))


def _wrong_rope(rope: HfConfig) -> Iterator[str]:
    for name, value in rope.items():
        known = _ROPE_RANGES.get(str(name))
        if known is not None and not (value is None and name in _NULL_IN_ROPE) and not known.holds(value):
            yield f"expected {known.words} for `{name}`, got {shown(value)}"
            return
    kind = rope.get("rope_type", rope.get("type", "default"))
    missing = [name for name in _NEEDED_BY_ROPE.get(kind, ()) if name not in rope]
    if missing:
        yield f"lacks `{missing[0]}`, which {kind} needs"
