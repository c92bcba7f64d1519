"""The interface of samplers, which choose the prompts of each step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

_ROW_BITS = 40


def prompt_id(source: int, row: int) -> int:
    return source << _ROW_BITS | row


def source_of(prompt: int) -> int:
    return prompt >> _ROW_BITS


def row_of(prompt: int) -> int:
    return prompt & ((1 << _ROW_BITS) - 1)


type State = dict[str, Any]
"""State of an order in a checkpoint: plain data, and numpy arrays before they are written as JSON."""


@dataclass(frozen=True, slots=True)
class SourceRows:
    """A sampler's view of a source."""

    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a prompt in a step."""

    prompt: int
    reward: float | None = None
    """Mean over its samples; None if nothing was sampled."""
    pass_rate: float | None = None
    """Fraction of its samples with a reward of at least ``data.val_pass_reward``."""
    advantage: float | None = None
    """Mean of |advantage| over its tokens; None if the step did not train on it."""
    tokens: int = 0
    """Tokens of the prompt and its responses, summed over its samples."""


@dataclass(frozen=True, slots=True)
class GroupOutcomes:
    """Outcomes of groups, from an op."""

    groups: np.ndarray
    """int64 [groups]."""
    reward: np.ndarray
    pass_rate: np.ndarray
    advantage: np.ndarray
    """float64 [groups]; NaN for unknown values."""


Unusable = Sequence[Collection[int]]
"""Unusable rows of each source."""


class Sampler(Protocol):
    """Chooses the prompts of each step. Its choices depend only on its calls."""

    observes: bool
    metrics: frozenset[str]
    """Metrics of a step that it needs."""
    foresees: bool
    """Whether `take` may be called for a prediction, followed by `load` of an earlier `state`."""

    def take(self, count: int, step: int, unusable: Unusable) -> list[int]:
        """Ids of the next prompts. Each source that it draws from has usable rows."""
        ...

    def replace(self, source: int, count: int, step: int, unusable: Unusable) -> list[int]:
        """Replacements for prompts that are too long, from the same source if possible."""
        ...

    def observe(self, step: int, outcomes: Sequence[Outcome], metrics: Mapping[str, float]) -> None:
        """Learn the outcomes and metrics of a step. Called in the order of the steps."""
        ...

    def passed(self) -> list[int]:
        """Number of prompts of each source that were taken or skipped, over all epochs."""
        ...

    def state(self) -> State:
        """Plain data, or numpy arrays, that later calls do not change."""
        ...

    def load(self, state: State, sources: Sequence[str]) -> None:
        """Restore `state`, decoded from JSON, of a run with these `sources`."""
        ...
