"""Reads scripts that contain only assignments and calls, on machines that cannot confine bash."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from dagrl.importing.settings import ImportProblem, Word

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$(?:\{([A-Za-z_]\w*|\d+)(?::?-([^{}]*))?\}|([A-Za-z_]\w*|\d))")
_BEYOND = re.compile(
    r"\$\(|`|<<|\$\{(?![A-Za-z_]\w*(?::?-[^{}]*)?\}|\d\})|[()]|^\s*(?:\w*\s*\(\)|(?:if|for|while|until|case|source|\.|eval|function)\s)"
)


def read_plain_script(
    path: Path, text: str, arguments: list[str], variables: Mapping[str, str], why: str
) -> list[list[Word]]:
    """Return the commands of a script that has only assignments and calls.

    ImportProblem with `why`, the reason why bash does not run here, for any other script.
    """
    scope = {
        "HOME": "~",
        "PWD": ".",
        **{str(number): text for number, text in enumerate(arguments, start=1)},
        **variables,
    }
    commands: list[list[Word]] = []
    for line, statement in _statements(text):
        if _BEYOND.search(statement):
            reason = (
                f"has more than assignments and calls, which only bash can read, and bash does not run here ({why})"
            )
            raise ImportProblem(f"{path}:{line}: {reason}")
        if assigned := _ASSIGNMENT.fullmatch(statement):
            if assigned[1] not in variables:
                scope[assigned[1]] = _expanded(" ".join(shlex.split(assigned[2], comments=True)), scope)
            continue
        words = []
        for offset, part in enumerate(statement.split("\n")):
            for word in shlex.split(part, comments=True):
                texts = arguments if word == "$@" else [_expanded(word, scope)]
                words += [Word(expanded, str(path), line + offset, tuple(_missing(expanded))) for expanded in texts]
        commands.append(words)
    return commands


def _statements(text: str) -> list[tuple[int, str]]:
    """The statements of a script with the numbers of their first lines; lines that a backslash joins are one."""
    statements: list[tuple[int, str]] = []
    joined = False
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = "" if line.lstrip().startswith("#") else line.rstrip()
        part = stripped.removesuffix("\\")
        if joined:
            statements[-1] = (statements[-1][0], f"{statements[-1][1]}\n{part}")
        elif part.strip():
            statements.append((number, part.strip()))
        joined = stripped.endswith("\\")
    return statements


def _expanded(text: str, scope: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return scope.get(name) or match[2] or f"${name}"

    return _REFERENCE.sub(value, text)


def _missing(text: str) -> list[str]:
    return re.findall(r"\$(?:[A-Za-z_]\w*|\d)", text)
