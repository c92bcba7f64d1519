"""Extracts the program from a response."""

from __future__ import annotations

import re

# Possessive quantifiers avoid backtracking within a line: a degenerate policy writes very long lines.
_BLOCK = re.compile(
    r"^(?P<indent>[ \t]*+)(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<language>\w*+)[^\n]*+\n(?P<code>.*?)"
    r"(?=^[ \t]*+(?P=fence)|\Z)(?:^[ \t]*+(?P=fence)[`~]*+[ \t]*+$)?",
    re.MULTILINE | re.DOTALL,
)
_PYTHON = ("python", "python3", "py")


def program_in(response: str) -> str | None:
    """The last Markdown block of Python in a response, else the last block without a language, else None.

    Fences are three or more backticks or tildes. An unclosed block extends to the end of the response.
    """
    blocks = [
        (found["language"].lower(), _dedented(found["code"], len(found["indent"])))
        for found in _BLOCK.finditer(response)
    ]
    for wanted in (_PYTHON, ("",)):
        found = [code for language, code in blocks if language in wanted and code.strip()]
        if found:
            return found[-1]
    return None


def _dedented(code: str, indent: int) -> str:
    """The lines without the indentation of the fence, as in an item of a list."""
    return re.sub(rf"^[ \t]{{1,{indent}}}", "", code, flags=re.MULTILINE) if indent else code
