"""The `exact` reward: 1 where the response is the reference answer, character by character."""

from __future__ import annotations

import re


def exact_reward(response: str, answer: str, *, ignore_case: bool = False, extract: str | None = None) -> float:
    """1.0 where `response` equals `answer`, white space at both ends left out, else 0.0.

    `extract` is a regular expression whose last match in the response is compared instead (its first group, where it
    has one); a response without a match gets 0.0. Raises ValueError where it is not a regular expression.
    """
    found = compared(response, ignore_case=ignore_case, extract=extract)
    answer = answer.strip()
    return float(found == (answer.casefold() if ignore_case else answer))


def compared(response: str, *, ignore_case: bool = False, extract: str | None = None) -> str | None:
    """The part of a response that is compared, as it is compared; None without one. Otherwise as `exact_reward`."""
    found = response if extract is None else _last_match(extract, response)
    if found is None:
        return None
    return found.strip().casefold() if ignore_case else found.strip()


def _last_match(pattern: str, text: str) -> str | None:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"extract is not a regular expression: {pattern!r}: {error}") from error
    matches = list(compiled.finditer(text))
    return matches[-1][1 if compiled.groups else 0] if matches else None
