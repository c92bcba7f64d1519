"""The `exact` reward: 1 if the response equals the reference answer as text."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"extract is not a regular expression: {pattern!r}: {error}; fix it") from error


Expression = Annotated[str, AfterValidator(_compiled)]


def exact_reward(response: str, answer: str, *, ignore_case: bool = False, extract: Expression | None = None) -> float:
    """1.0 if `response` equals `answer`, ignoring surrounding white space, else 0.0.

    `extract` is a regular expression: its last match in the response is compared (its first group, if it has one); a
    response without a match gets 0.0. Raises ValueError if it is not a regular expression.
    """
    answer_text = compared(response, ignore_case=ignore_case, extract=extract)
    answer = answer.strip()
    return float(answer_text == (answer.casefold() if ignore_case else answer))


def compared(response: str, *, ignore_case: bool = False, extract: str | None = None) -> str | None:
    """The part of a response to compare, normalised; None without one. Arguments are as in `exact_reward`."""
    answer_text = response if extract is None else _last_match(extract, response)
    if answer_text is None:
        return None
    return answer_text.strip().casefold() if ignore_case else answer_text.strip()


def _last_match(pattern: str, text: str) -> str | None:
    compiled = _compiled(pattern)
    matches = list(compiled.finditer(text))
    return matches[-1][1 if compiled.groups else 0] if matches else None
