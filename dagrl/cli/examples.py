"""Examples in the help of commands: what follows ``Examples:`` in the docstring of a command's function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CommandHelp:
    """The help of a command."""

    text: str
    examples: tuple[str, ...]

    @classmethod
    def of(cls, command: Callable[..., Any]) -> CommandHelp:
        """Split the docstring of a command's function."""
        text, _, examples = inspect.cleandoc(command.__doc__ or "").partition("\nExamples:\n")
        return cls(text.rstrip(), tuple(line.strip() for line in examples.splitlines() if line.strip()))

    @property
    def epilog(self) -> str | None:
        """The examples, one a line; None without any."""
        # \b: what follows is not wrapped.
        return "\n".join(["\b", "Examples:", *(f"  {each}" for each in self.examples)]) if self.examples else None
