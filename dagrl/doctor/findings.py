"""The findings about a machine, one line for each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """Whether a finding lets runs start."""

    OK = "ok"
    HINT = "hint"
    """Runs start, but some need it, or are better with it."""
    MISSING = "missing"
    """Runs fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    verdict: Verdict
    name: str
    text: str


def ok(name: str, text: str) -> Finding:
    """Report a check that passes."""
    return Finding(Verdict.OK, name, text)


def hint(name: str, text: str) -> Finding:
    """Report something that could be better."""
    return Finding(Verdict.HINT, name, text)


def missing(name: str, text: str) -> Finding:
    """Report something without which runs fail."""
    return Finding(Verdict.MISSING, name, text)
