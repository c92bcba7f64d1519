r"""The final answer of a worked solution: what stands in its last ``\boxed{}``, ``<answer>``, or behind ``####``."""

from __future__ import annotations

import re

from dagrl.rewards.in_latex import in_latex

BOXED = r"\boxed{"
ANSWER, ANSWER_END = "<answer>", "</answer>"
GSM8K_MARK = "####"
# An escaped brace is printed and closes nothing.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_DIGIT = re.compile(r"\d")
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?")
_SPACING = re.compile(r"\\[,;:! ]|\\(?:left|right|displaystyle)(?![a-z])|[\s$~]")
_IN_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\{([^{}]*)\}")


def last_boxed(text: str) -> str | None:
    r"""The last ``\boxed{...}`` with its braces; None without one, or where it does not close."""
    start = text.rfind(BOXED)
    depth = 0
    for brace in _BRACE.finditer(text, start + len(BOXED) - 1) if start >= 0 else ():
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return text[start : brace.end()]
    return None


def marked_part(response: str) -> str | None:
    r"""The part of a response that is marked as its final answer; None where nothing is.

    The last ``\boxed{...}``, braces included; else what is between the last ``<answer>`` and ``</answer>``; else the
    word behind GSM8K's ``####``, where it ends a line.
    """
    boxed = last_boxed(response)
    if boxed is not None:
        return boxed
    _, mark, rest = response.rpartition(ANSWER_END)[0].rpartition(ANSWER)
    if mark and rest.strip():
        return rest.strip()
    # The mark and the answer end a line; what only begins with the mark may be a heading of Markdown.
    for line in reversed(response.split("\n")):
        _, mark, behind = line.rpartition(GSM8K_MARK)
        words = behind.split()
        if mark and len(words) == 1 and _DIGIT.search(words[0]):
            return words[0].strip("*_`")
    return None


def final_answer(response: str) -> str | None:
    r"""The final answer as a text that is the same for the same answer, as far as writing goes.

    What is marked, else the last number; None without either. What `in_latex` writes alike is alike, and spacing,
    ``$``, ``\text{}``, commas in numbers and zeros behind a point make no difference; ``1/2`` and ``0.5`` do.
    """
    marked = marked_part(response)
    if marked is None:
        numbers = _NUMBER.findall(response)
        return _written_alike(numbers[-1]) if numbers else None
    return _written_alike(marked.removeprefix(BOXED).removesuffix("}") if marked.startswith(BOXED) else marked)


def _written_alike(answer: str) -> str | None:
    answer = _SPACING.sub("", _IN_TEXT.sub(r"\1", in_latex(answer))).rstrip(".")
    answer = answer.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace(r"\%", "%")
    answer = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer)
    if re.fullmatch(r"-?\d+\.\d*", answer):
        answer = answer.rstrip("0").rstrip(".")
    return answer or None
