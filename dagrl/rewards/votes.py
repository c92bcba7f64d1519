"""Extracts an answer from a response as text, to be counted by ``maj@k``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from dagrl.config.schema.val_metrics import Vote
from dagrl.plugins.calls import call_or_stop
from dagrl.plugins.custom import load_function, located, name_of
from dagrl.rewards.exact import compared
from dagrl.rewards.final_answer import final_answer

Answered = Callable[[str], str | None]
"""From a response to its answer; None if it gives none."""


def load_vote(vote: Vote, folder: Path | None = None) -> Answered:
    """The function of a `Vote`; user modules are also searched in `folder`. Raises ValueError for an unknown name.

    The returned function raises ValueError with its location if the user's function fails.
    """
    if vote.fn == "math":
        return partial(final_answer, strict=vote.args.get("strict", False))
    if vote.fn == "exact":
        return partial(compared, **vote.args)
    return partial(_called, load_function(vote.fn, folder))


def _called(function: Callable[[str], object], response: str) -> str | None:
    answer = call_or_stop(f"data.val_vote {name_of(function)}", function, {}, response)
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"data.val_vote {located(function)} returned {answer!r}; return a text or None")
    return answer
