"""What is told of a formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HAND = "numbers by hand"
"""What most formulas are tested against."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One formula."""

    name: str
    """As the pipeline file says it."""
    formula: str
    """In short, in code's letters."""
    function: Callable[..., Any]
    source: str
    """As in the function's docstring."""
    test: str
    """File in ``tests/algorithms`` without ``test_`` and ``.py``, two colons, the test's name without ``test_``."""
    against: str
    """What that test compares it with."""
    template: str | None = None
    """One of ``dag_templates/`` that is about it."""


@dataclass(frozen=True, slots=True)
class Chapter:
    """Formulas that stand in one place of the pipeline file."""

    title: str
    place: str
    """Where the file says it."""
    introduction: str
    entries: tuple[Entry, ...]
    notes: str = ""
    """What is to be known beyond the table, as Markdown."""
