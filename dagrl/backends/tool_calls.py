"""Tool calls in the text of a response, and the type of the parsers that find them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BEGIN = re.compile(r"<(?:seed:)?think>|\[THINK\]")
_MARK_TOKENS = 16
"""Most tokens of such a mark, with the space after it."""
_REASONING = re.compile(r".*(?:</(?:seed:)?think>|\[/THINK\])", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool's name and arguments."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """The id written by the policy, if the syntax has ids."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """An attempt at a call that cannot be parsed."""

    why: str


class Parser(Protocol):
    """Finds the calls in the text of a turn."""

    def __call__(self, text: str, /, *, thinks: bool = False) -> Sequence[Call | MalformedCall]:
        """The calls in order. `text` has no end token; `thinks`: the prompt has begun the reasoning."""


def after_reasoning(text: str) -> str:
    """The text after a model's reasoning."""
    # Not `sub`, which searches from each character: a text without reasoning would take the square of its length.
    reasoning = _REASONING.match(text)
    return text[reasoning.end() :] if reasoning else text


def outside_reasoning(text: str, *, thinks: bool) -> str:
    """Like `after_reasoning`, but also the text before unfinished reasoning; `thinks` as in `Parser`."""
    answer = after_reasoning(text)
    return "" if thinks and answer == text else _BEGIN.split(answer, maxsplit=1)[0]


def begins_reasoning(tokenizer: PreTrainedTokenizerBase, context: np.ndarray) -> bool:
    """Whether the tokens before a turn end with the mark that begins reasoning, which some templates write."""
    end = tokenizer.decode(context[-_MARK_TOKENS:]).rstrip()
    return any(mark.end() == len(end) for mark in _BEGIN.finditer(end))


def parsed_call(name: str, arguments: Any) -> Call | MalformedCall:
    """Parse a call. Arguments are a mapping, or a JSON string of one, which some models write."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return MalformedCall(f"the arguments of {name} are not JSON: {error}")
    if not isinstance(arguments, dict):
        return MalformedCall(f"the arguments of {name} must be a JSON object")
    return Call(name, arguments)
