"""Limits of a conversation with the policy, which end an episode as its environment would."""

from __future__ import annotations

_LIMITS = ("context_length_exceeded", "turn_limit_exceeded")


def is_limit(error: Exception) -> bool:
    """Whether an error of the client says that the policy may not be asked again in this episode."""
    return getattr(error, "code", None) in _LIMITS
