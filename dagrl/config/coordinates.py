"""The place of one rank in the parallel layout of its engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Place of one rank in its engine's layout. Ranks with the same `dp` get the same rows."""

    tp: int
    cp: int
    dp: int
    pp: int
    primary: bool
    """Whether the rank returns the results of its data-parallel rank."""
    etp: int = 0
    """Index of its part of the experts' matrices."""
    ep: int = 0
    """Index of its set of experts."""
    expert_dp: int = 0
    """Index of its copy of those experts."""
