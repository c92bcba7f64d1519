"""Tool calls in the text of a response, and the type of the parsers that find them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True)
class Call:
    """A tool's name and arguments."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """An attempt at a call that cannot be parsed."""

    why: str


type Parser = Callable[[str], Sequence[Call | MalformedCall]]
"""From the text of a turn, without the token that ended it, to the calls in it, in order."""


def after_reasoning(text: str) -> str:
    """The text after a model's reasoning."""
    return text.rpartition(_END_OF_THOUGHT)[2]


def parsed_call(name: str, arguments: Any) -> Call | MalformedCall:
    """A call with arguments that are a mapping, or a JSON string of one, as some models write it."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return MalformedCall(f"the arguments of {name} are not JSON: {error}")
    if not isinstance(arguments, dict):
        return MalformedCall(f"the arguments of {name} must be a JSON object")
    return Call(name, arguments)
