"""Templates of questions to a judge, and parsers of its replies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dagrl.plugins.custom import UserFunction, known_parameters, name_of

_SHOWN_CHARACTERS = 300
_LARGEST = 3.4e38
"""A reward is a float32."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Fields of a sample for a template."""

    prompt: str
    response: str
    answer: str
    data_source: str


FIELDS = tuple(field.name for field in fields(Judged))
"""Names of the template's fields."""
PROMPT_FIELD = "{prompt}"
_FIELD = re.compile(r"\{(" + "|".join(FIELDS) + r")\}")
_FIELD_LIKE = re.compile(r"\{(\w+)\}")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def filled(template: str, judged: Judged) -> str:
    """Fill in the template's fields; other braces are kept."""
    return _FIELD.sub(lambda found: getattr(judged, found[1]), template)


def fields_in(template: str) -> set[str]:
    """All names in braces, fields or not."""
    return set(_FIELD_LIKE.findall(template))


def is_function(parser: str) -> bool:
    """Whether a parser is a ``module:function``, not a regular expression."""
    return _FUNCTION.fullmatch(parser) is not None


def parse(reply: str, pattern: re.Pattern[str], scores: Mapping[str, float] | None) -> float:
    """The score in a judge's reply: the last match or its first group, as a number or by `scores`.

    ValueError if there is none.
    """
    matches = list(pattern.finditer(reply))
    if not matches:
        raise ValueError(f"nothing in it matches {pattern.pattern!r}")
    score = (matches[-1][1 if pattern.groups else 0] or "").strip()
    if scores is not None:
        if score not in scores:
            raise ValueError(f"it contains {score!r}, which is none of {', '.join(scores)}")
        return scores[score]
    try:
        return finite(float(score))
    except ValueError as error:
        raise ValueError(f"it contains {score!r}, which is no number") from error


def finite(score: Any) -> float:
    """A score as a float. ValueError if it is not a finite number."""
    number = score.item() if hasattr(score, "item") else score
    if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= _LARGEST:
        raise ValueError(f"the score {number!r} is no finite number")
    return float(number)


def parser_arguments(function: UserFunction) -> tuple[str, ...]:
    """The names among ``reply`` and the template's fields that a user's parser takes. ValueError if it does not fit."""
    taken = known_parameters(function, name_of(function), ("reply", *FIELDS))
    if "reply" not in taken:
        raise ValueError(f"the parser {name_of(function)} does not take `reply`, the judge's answer; add it")
    return taken


def shown(text: str) -> str:
    """A text, shortened, for an error."""
    half = _SHOWN_CHARACTERS // 2
    quoted = repr(text)
    return quoted if len(quoted) <= _SHOWN_CHARACTERS else f"{quoted[:half]} ... {quoted[-half:]}"
