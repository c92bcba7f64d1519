"""The built-in samplers: each source has its own order of rows, and the sources are mixed by weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dagrl.data.order.passes import RowOrder
from dagrl.data.order.sampler import Outcome, SourceRows, State, Unusable, prompt_id, row_of, source_of

_STATE = ("credit", "tokens", "counted", "charged", "open")
_MEMORY = 1 - 1 / 1024
"""Weight of earlier observations in the mean tokens of a prompt."""


class Mixture:
    """Shares of prompts, or of tokens, by weights.

    Prompts: a solution of the chairman assignment problem (Tijdeman 1980), so that with constant weights the prompts of
    each source differ from its share by less than one after every prompt. A step whose shares are whole numbers takes
    exactly these.

    Tokens: the same with the mean tokens of a source's earlier prompts as their cost; the difference from the actual
    cost is settled once it is known.
    """

    def __init__(self, sources: int, *, by_tokens: bool = False) -> None:
        self._by_tokens = by_tokens
        self._credit = np.zeros(sources)
        """The remaining share of each source, in prompts or tokens."""
        self._tokens = np.zeros(sources)
        self._counted = np.zeros(sources)
        """Tokens of the prompts with a known outcome, and the number of these prompts."""
        self._charged = np.zeros(sources)
        self._open = np.zeros(sources)
        """The charge for the prompts without a known outcome, and the number of these prompts."""

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
            # Ordered by the deadline at which a source would be behind by more than the bound.
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
        # A source without outcomes has the mean of the other sources.
        return np.maximum((self._tokens + mean) / (self._counted + 1), 1e-9)

    def observe(self, source: int, tokens: int, weights: Sequence[float]) -> None:
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

    def state(self) -> State:
        return {name: getattr(self, f"_{name}").copy() for name in _STATE}

    def load(self, state: State) -> None:
        for name in _STATE:
            setattr(self, f"_{name}", np.array(state[name], dtype=np.float64))


@dataclass(frozen=True, slots=True)
class Stage:
    """Weights for a part of a run."""

    weights: tuple[float, ...]
    until_step: int | None = None
    until_metric: Mapping[str, float] = field(default_factory=dict)
    """The stage ends when all these metrics have reached their values in one step."""
    move_over: int = 0
    """Steps in which the weights move linearly from the previous stage's."""


class Stages:
    """Stages, one after the other; a single stage has constant weights."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self.current = list(stages[0].weights)
        """The weights of the newest step."""
        self._stage, self._began = 0, 1
        self._reached = False
        """Whether the metrics of the stage have reached their values."""

    @property
    def metrics(self) -> frozenset[str]:
        return frozenset(name for stage in self._stages for name in stage.until_metric)

    def weights(self, step: int) -> list[float]:
        """The weights in `step`; steps come in order."""
        while self._ends_before(step):
            self._stage, self._began, self._reached = self._stage + 1, step, False
        stage = self._stages[self._stage]
        part = min(1.0, (step - self._began + 1) / (stage.move_over + 1))
        before = self._stages[max(0, self._stage - 1)].weights
        self.current = [old + part * (new - old) for old, new in zip(before, stage.weights, strict=True)]
        return self.current

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        wanted = self._stages[self._stage].until_metric
        if wanted and step >= self._began:
            self._reached |= all(metrics.get(name, -float("inf")) >= wanted[name] for name in wanted)

    def state(self) -> State:
        return {"stage": self._stage, "began": self._began, "reached": self._reached, "current": self.current}

    def load(self, state: State) -> None:
        self._stage = min(state["stage"], len(self._stages) - 1)
        self._began, self._reached = state["began"], state["reached"]
        if len(state["current"]) == len(self.current):
            self.current = state["current"]

    def _ends_before(self, step: int) -> bool:
        stage = self._stages[self._stage]
        over = self._reached or (stage.until_step is not None and step > stage.until_step)
        return over and self._stage + 1 < len(self._stages)


class MixedSources:
    """A `Sampler` of row orders, one for each source."""

    def __init__(
        self,
        sources: Sequence[SourceRows],
        orders: Sequence[RowOrder],
        stages: Stages,
        *,
        by_tokens: bool = False,
        adaptive: bool = False,
    ) -> None:
        """`by_tokens`: weights are shares of tokens. `adaptive`: `orders` learn from outcomes."""
        self._names = [source.name for source in sources]
        self._orders, self._stages = orders, stages
        self._mixture = Mixture(len(sources), by_tokens=by_tokens)
        self.observes = adaptive or (by_tokens and len(sources) > 1)
        self.foresees = not adaptive
        self.metrics = stages.metrics

    def take(self, count: int, step: int, unusable: Unusable) -> list[int]:
        chosen = self._mixture.take(count, self._stages.weights(step))
        rows = {
            source: iter(self.replace(source, chosen.count(source), step, unusable)) for source in sorted({*chosen})
        }
        return [next(rows[source]) for source in chosen]

    def replace(self, source: int, count: int, step: int, unusable: Unusable) -> list[int]:
        return [prompt_id(source, row) for row in self._orders[source].take(count, unusable[source], step)]

    def observe(self, step: int, outcomes: Sequence[Outcome], metrics: Mapping[str, float]) -> None:
        of_source: list[dict[int, Outcome]] = [{} for _ in self._orders]
        for outcome in outcomes:
            source = source_of(outcome.prompt)
            of_source[source][row_of(outcome.prompt)] = outcome
            self._mixture.observe(source, outcome.tokens, self._stages.current)
        for order, mine in zip(self._orders, of_source, strict=True):
            order.observe(step, mine)
        self._stages.observe(step, metrics)

    def passed(self) -> list[int]:
        return [order.passed for order in self._orders]

    def state(self) -> State:
        orders = {name: order.state() for name, order in zip(self._names, self._orders, strict=True)}
        return {"stages": self._stages.state(), "mixture": self._mixture.state(), "orders": orders}

    def load(self, state: State, sources: Sequence[str]) -> None:
        self._stages.load(state["stages"])
        if list(sources) == self._names:
            self._mixture.load(state["mixture"])
        for name, order in zip(self._names, self._orders, strict=True):
            if name in state["orders"]:
                order.load(state["orders"][name])
