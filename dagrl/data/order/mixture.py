"""Mixtures: from which source each prompt comes, by weights that may change from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_STATE = ("credit", "tokens", "counted", "charged", "open")
_MEMORY = 1 - 1 / 1024
"""Weight of what was observed before, in the mean tokens of a prompt."""


class Mixture:
    """Shares of prompts, or of tokens, by weights.

    Prompts: a solution of the chairman assignment problem (Tijdeman 1980), so that with constant weights the prompts of
    each source differ from its share by less than one after every prompt. A step whose shares are whole numbers takes
    exactly these.

    Tokens: the same with the mean tokens of a source's prompts so far as their price, and what a prompt has cost above
    or below it is settled once it is known.
    """

    def __init__(self, sources: int, *, by_tokens: bool = False) -> None:
        self._by_tokens = by_tokens
        self._credit = np.zeros(sources)
        """The remaining share of each source, in prompts or tokens."""
        self._tokens = np.zeros(sources)
        self._counted = np.zeros(sources)
        """Tokens of the prompts whose outcome is known, and the number of these prompts."""
        self._charged = np.zeros(sources)
        self._open = np.zeros(sources)
        """The charge for the prompts whose outcome is not known, and the number of these prompts."""

    def take(self, count: int, weights: Sequence[float]) -> list[int]:
        """The sources of the next prompts. `weights` are not negative, and one is positive."""
        shares = np.array(weights, dtype=np.float64)
        shares /= shares.sum()
        prices = self.prices()
        rates = shares / prices / (shares / prices).sum()
        usable = np.flatnonzero(shares > 0).tolist()
        slack = 1 - 1 / (2 * len(usable) - 2) if len(usable) > 1 else 1.0
        credit, taken = self._credit / prices, []
        for _ in range(count):
            credit += rates
            due = [source for source in usable if credit[source] >= 1 - slack]
            # By the deadline at which a source would be behind by more than the bound.
            chosen = min(due or usable, key=lambda source: (slack - credit[source]) / rates[source])
            credit[chosen] -= 1
            self._charged[chosen] += prices[chosen]
            self._open[chosen] += 1
            taken.append(chosen)
        self._credit = credit * prices
        return taken

    def prices(self) -> np.ndarray:
        """Expected cost of a prompt of each source, float64 [sources]."""
        if not self._by_tokens or not self._counted.any():
            return np.ones(len(self._credit))
        mean = self._tokens.sum() / self._counted.sum()
        # Until a source has outcomes of its own, it has the mean of the others.
        return np.maximum((self._tokens + mean) / (self._counted + 1), 1e-9)

    def observe(self, source: int, tokens: int, weights: Sequence[float]) -> None:
        """A prompt of `source` has cost so many tokens, itself and its responses."""
        if not self._by_tokens or not self._open[source]:
            return
        shares = np.array(weights, dtype=np.float64)
        charged = self._charged[source] / self._open[source]
        self._charged[source] -= charged
        self._open[source] -= 1
        above = tokens - charged
        self._credit += shares / shares.sum() * above
        self._credit[source] -= above
        self._tokens *= _MEMORY
        self._counted *= _MEMORY
        self._tokens[source] += tokens
        self._counted[source] += 1

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, f"_{name}").copy() for name in _STATE}

    def load(self, state: Mapping[str, Any]) -> None:
        for name in _STATE:
            setattr(self, f"_{name}", np.array(state[name], dtype=np.float64))
