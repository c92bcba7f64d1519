"""The built-in samplers: rows of each source in an order of its own, mixed by weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dagrl.data.order.ids import prompt_id, row_of, source_of
from dagrl.data.order.mixture import Mixture
from dagrl.data.order.passes import RowOrder
from dagrl.data.order.sampler import Outcome, SourceRows, Unusable
from dagrl.data.order.stages import Stages


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
        for each in outcomes:
            source = source_of(each.prompt)
            of_source[source][row_of(each.prompt)] = each
            self._mixture.observe(source, each.tokens, self._stages.current)
        for order, mine in zip(self._orders, of_source, strict=True):
            order.observe(step, mine)
        self._stages.observe(step, metrics)

    def passed(self) -> list[int]:
        return [order.passed for order in self._orders]

    def state(self) -> dict[str, Any]:
        orders = {name: order.state() for name, order in zip(self._names, self._orders, strict=True)}
        return {"stages": self._stages.state(), "mixture": self._mixture.state(), "orders": orders}

    def load(self, state: Mapping[str, Any], sources: Sequence[str]) -> None:
        self._stages.load(state["stages"])
        if list(sources) == self._names:
            self._mixture.load(state["mixture"])
        for name, order in zip(self._names, self._orders, strict=True):
            if name in state["orders"]:
                order.load(state["orders"][name])
