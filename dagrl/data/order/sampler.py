"""The interface of samplers, which decide which prompts each step takes."""

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
"""What a checkpoint holds of an order: plain data, and numpy arrays before they are written as JSON."""


@dataclass(frozen=True, slots=True)
class SourceRows:
    """A source, as a sampler sees it."""

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
    """Mean of |advantage| over its tokens; None if the step has not trained on it."""
    tokens: int = 0
    """Tokens of the prompt and its responses, summed over its samples."""


@dataclass(frozen=True, slots=True)
class GroupOutcomes:
    """Outcomes by group, as an op knows them."""

    groups: np.ndarray
    """int64 [groups]."""
    reward: np.ndarray
    pass_rate: np.ndarray
    advantage: np.ndarray
    """float64 [groups]; NaN for what is not known."""


Unusable = Sequence[Collection[int]]
"""Rows of each source that are never taken."""


class Sampler(Protocol):
    """Decides which prompts each step takes. Its calls alone determine what it decides."""

    observes: bool
    metrics: frozenset[str]
    """Metrics of a step that it needs."""
    foresees: bool
    """Whether `take` may be called to see what comes, with `load` of an earlier `state` after it."""

    def take(self, count: int, step: int, unusable: Unusable) -> list[int]:
        """Ids of the next prompts. Each source that it draws from has usable rows."""
        ...

    def replace(self, source: int, count: int, step: int, unusable: Unusable) -> list[int]:
        """Further prompts, if possible of this source, of which others turned out to be too long."""
        ...

    def observe(self, step: int, outcomes: Sequence[Outcome], metrics: Mapping[str, float]) -> None:
        """Learn the outcomes and metrics of a step. Called in the order of the steps."""
        ...

    def passed(self) -> list[int]:
        """Prompts of each source that were taken or passed over, over all epochs."""
        ...

    def state(self) -> State:
        """Plain data, or numpy arrays, that later calls do not change."""
        ...

    def load(self, state: State, sources: Sequence[str]) -> None:
        """`state` as JSON returns it, of a run with these `sources`."""
        ...
