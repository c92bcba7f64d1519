"""Abilities of an engine, which ops ask for."""

from __future__ import annotations

from enum import Enum


class Capability(Enum):
    """An ability that an op needs of its engine."""

    GENERATE = "generate"
    """Sample responses."""
    SCORE = "score"
    """Compute log-probs, or a critic's values, of given tokens."""
    JUDGE = "judge"
    """Compute one score for each row with a reward head."""
    REPLY = "reply"
    """Answer questions in text."""
    TRAIN = "train"
    """Update weights."""
