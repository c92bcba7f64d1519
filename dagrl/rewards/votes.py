"""The answer in a response, as a text that can be counted: what ``maj@k`` counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dagrl.graph.plugins.custom import load_function, located, name_of, raised_by
from dagrl.graph.val_metrics import Vote
from dagrl.rewards.exact import compared
from dagrl.rewards.final_answer import final_answer

Answered = Callable[[str], str | None]
"""A response in, its answer out; None where it gives none."""


def load_vote(vote: Vote, folder: Path | None = None) -> Answered:
    """The function behind a `Vote`; modules of the user's own are also looked for in `folder`. ValueError for no such.

    What it returns raises ValueError, with the function and the line, where the user's own fails.
    """
    if vote.fn == "math":
        return final_answer
    if vote.fn == "exact":
        return partial(compared, **vote.args)
    return partial(_called, load_function(vote.fn, folder))


def _called(function: Callable[[str], Any], response: str) -> str | None:
    try:
        answer = function(response)
    except (Exception, SystemExit) as error:
        raise ValueError(f"data.val_vote {name_of(function)} {raised_by(function, error)}") from error
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"data.val_vote {located(function)} returned {answer!r}; an answer is a text, or None")
    return answer
