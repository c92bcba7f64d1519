"""Extracts the program from a response."""

from __future__ import annotations

import re

# Possessive quantifiers avoid backtracking within a line: a degenerate policy writes very long lines.
_BLOCK = re.compile(
    r"^([ \t]*+)```[ \t]*+(\w*+)[^\n]*+\n(.*?)(?=^[ \t]*+```|\Z)(?:^[ \t]*+```[ \t]*+$)?", re.MULTILINE | re.DOTALL
)
_PYTHON = ("python", "python3", "py")


def program_in(response: str) -> str | None:
    """The last Markdown block of Python in a response, else the last block without a language, else None.

    An unclosed block extends to the end of the response.
    """
    blocks = [(language.lower(), _dedented(code, len(indent))) for indent, language, code in _BLOCK.findall(response)]
    for wanted in (_PYTHON, ("",)):
        found = [code for language, code in blocks if language in wanted and code.strip()]
        if found:
            return found[-1]
    return None


def _dedented(code: str, indent: int) -> str:
    """The lines without the indentation of the fence, as in an item of a list."""
    return re.sub(rf"^[ \t]{{1,{indent}}}", "", code, flags=re.MULTILINE) if indent else code
