"""The findings about a machine or a model, one line for each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial


class Verdict(Enum):
    """Whether a finding lets runs start."""

    OK = "ok"
    HINT = "hint"
    """Runs start, but some features need it or profit from it."""
    MISSING = "missing"
    """Runs fail."""
    REFUSED = "refused"
    """The Megatron engine does not train this model."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    verdict: Verdict
    name: str
    text: str


ok = partial(Finding, Verdict.OK)
hint = partial(Finding, Verdict.HINT)
missing = partial(Finding, Verdict.MISSING)
refused = partial(Finding, Verdict.REFUSED)
