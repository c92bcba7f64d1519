"""What is asked for, and reference answers out of what the authors wrote."""

from __future__ import annotations

import math
import re
from typing import Any

BOXED_INSTRUCTION = r"Think step by step, and put the final answer within \boxed{}."

_END_OF_FORMULA = r"\s*[.,;]?\s*(?:\$|\\[\])\\]|\\(?:end|boxed|fbox)\b|$)"
_BOX = re.compile(rf"\\(?:boxed|fbox)\s*(\{{|[^\s{{$].*?(?={_END_OF_FORMULA}))", re.MULTILINE)


def asked(question: str, instruction: str) -> str:
    """A question with its instruction, as one message."""
    return f"{question} {instruction}".strip()


def last_boxed(solution: str) -> str | None:
    r"""What the last ``\boxed{...}`` (or ``\fbox{...}``) of a solution holds.

    Without braces, as in ``$\boxed 12$``, that is the rest of the formula, as in MATH's own evaluation. None without a
    box, or where its braces do not close.
    """
    boxes = list(_BOX.finditer(solution))
    if not boxes:
        return None
    last = boxes[-1]
    return _to_closing_brace(solution, last.end()) if last[1] == "{" else last[1]


def _to_closing_brace(text: str, start: int) -> str | None:
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        # An escaped brace is printed and closes nothing.
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:position].strip()
        position += 1
    return None


def answer_text(answer: Any) -> str:
    """An answer as text: whole numbers without a point (``142.0`` is ``142``), nothing as ``""``, and so is NaN."""
    if answer is None or (isinstance(answer, float) and math.isnan(answer)):
        return ""
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return str(answer).strip()
