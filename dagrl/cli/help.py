"""The help of commands, from the docstrings of their functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def help_of(command: Callable[..., Any]) -> dict[str, Any]:
    """Options of typer: the text of a docstring, and the lines after ``Examples:`` as epilog."""
    text, _, examples = inspect.cleandoc(command.__doc__ or "").partition("\nExamples:\n")
    # \b: the lines that follow are not wrapped.
    return {"help": text.rstrip(), "epilog": f"\b\nExamples:\n{examples.replace('    ', '  ')}"}
