"""Adaptive KL weights: the weight of each step, and what a checkpoint keeps. Pure.

A step's weight depends on the divergence of an earlier step that has always ended by then: the one before it, or
``schedule.max_staleness`` steps further back. So it is reproducible, also after a resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagrl.algorithms.kl_control import steered
from dagrl.config.schema import AdvantageNode, KlInRewardSpec, Pipeline
from dagrl.data.stats import Stat
from dagrl.workers.messages import Block

DIVERGENCE = "kl/reward_divergence"
"""The controlled statistic: the mean over a response's tokens, for each response."""


class KlControl:
    """The KL weights of all advantage nodes with a ``target_kl``."""

    def __init__(self, pipeline: Pipeline, kept: Mapping[str, Sequence[float]], first_step: int) -> None:
        """`kept`: what `after` returned for the step before `first_step`; empty at the start of a run."""
        self._lag = pipeline.schedule.max_staleness + 1
        self._specs: dict[str, KlInRewardSpec] = {
            name: node.kl_in_reward
            for name, node in pipeline.nodes.items()
            if isinstance(node, AdvantageNode) and node.kl_in_reward and node.kl_in_reward.target_kl
        }
        self._weights = {
            name: dict(enumerate(self._first(spec, kept.get(name, ())), first_step))
            for name, spec in self._specs.items()
        }
        """Node -> step -> weight, as far as known."""
        self._measured: dict[tuple[str, int], dict[tuple[int, ...], Stat]] = {}
        """Node and step -> shards -> statistic."""

    def weight(self, node: str, step: int) -> float | None:
        """The weight of a step. None if the node's weight is fixed."""
        return self._weight(node, step) if node in self._specs else None

    def add(self, node: str, step: int, block: Block) -> None:
        """Add the divergence that a block of the node has measured."""
        if node in self._specs:
            for name, stat in block.stats.items():
                if name.endswith(DIVERGENCE):
                    self._measured.setdefault((node, step), {})[block.shards] = stat

    def after(self, step: int) -> dict[str, tuple[float, ...]]:
        """For the checkpoint of `step`: the weights of later steps that depend on earlier ones."""
        steps = range(step + 1, step + 1 + self._lag)
        return {name: tuple(self._weight(name, each) for each in steps) for name in self._specs}

    def commit(self, step: int) -> None:
        """Drop what no unknown weight depends on."""
        for name in self._specs:
            self._weight(name, step + 1)
            self._weights[name] = {each: weight for each, weight in self._weights[name].items() if each > step}
        self._measured = {key: stats for key, stats in self._measured.items() if key[1] > step - self._lag}

    def _first(self, spec: KlInRewardSpec, kept: Sequence[float]) -> list[float]:
        """Weights of the first steps, which no step of this run changes."""
        weights = list(kept)[: self._lag] or [spec.coef]
        return weights + [weights[-1]] * (self._lag - len(weights))

    def _weight(self, node: str, step: int) -> float:
        known = self._weights[node]
        newest = max(known)
        while newest < step:
            newest += 1
            known[newest] = self._next(node, newest)
        return known[step]

    def _next(self, node: str, step: int) -> float:
        spec, before = self._specs[node], self._weights[node][step - 1]
        # In the order of shards, so that rounding is reproducible.
        measured = sorted(self._measured.get((node, step - self._lag), {}).items())
        samples, total = sum(stat.count for _, stat in measured), sum(stat.total for _, stat in measured)
        if not samples:
            return before
        assert spec.target_kl is not None
        return steered(before, divergence=total / samples, samples=samples, target=spec.target_kl, horizon=spec.horizon)
