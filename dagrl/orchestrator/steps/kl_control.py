"""Weights of divergences that follow a target: what each step's is, and what a checkpoint keeps of it. Pure.

A step's weight depends on the divergence of the newest step that is sure to be over when its own samples are there: the
one before it, or as many further back as ``schedule.max_staleness`` says. So it is the same in every run, and after a
resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagrl.algorithms.kl_control import steered
from dagrl.config.schema import AdvantageNode, KlInRewardSpec, Pipeline
from dagrl.data.stats import Stat
from dagrl.workers.messages import Block

DIVERGENCE = "kl/reward_divergence"
"""The statistic that is steered: the mean over a response's tokens, of each response."""


class KlControl:
    """The weights of all advantage nodes with a ``target_kl``."""

    def __init__(self, pipeline: Pipeline, kept: Mapping[str, Sequence[float]], first_step: int) -> None:
        """`kept`: what `after` said of the step before `first_step`, by node; empty at the start of a run."""
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
        """Node -> step -> its weight, of all steps from the first on that are known."""
        self._measured: dict[tuple[str, int], dict[tuple[int, ...], Stat]] = {}
        """Node and step -> shards -> what they said."""

    def weight(self, node: str, step: int) -> float | None:
        """The weight of a step; None where the node's stays as the file says."""
        return self._weight(node, step) if node in self._specs else None

    def note(self, node: str, step: int, block: Block) -> None:
        """Keep what a block of the node says about the divergence."""
        if node in self._specs:
            for name, stat in block.stats.items():
                if name.endswith(DIVERGENCE):
                    self._measured.setdefault((node, step), {})[block.shards] = stat

    def after(self, step: int) -> dict[str, tuple[float, ...]]:
        """What a checkpoint of `step` must keep: weights of the steps behind it that depend on what was before."""
        steps = range(step + 1, step + 1 + self._lag)
        return {name: tuple(self._weight(name, each) for each in steps) for name in self._specs}

    def commit(self, step: int) -> None:
        """Forget what no weight depends on any more that is not known."""
        for name in self._specs:
            self._weight(name, step + 1)
            self._weights[name] = {each: weight for each, weight in self._weights[name].items() if each > step}
        self._measured = {key: stats for key, stats in self._measured.items() if key[1] > step - self._lag}

    def _first(self, spec: KlInRewardSpec, kept: Sequence[float]) -> list[float]:
        """Weights of the steps that no step of this run can change."""
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
        # In the order of shards, so that rounding does not depend on who was first.
        said = sorted(self._measured.get((node, step - self._lag), {}).items())
        samples, total = sum(stat.count for _, stat in said), sum(stat.total for _, stat in said)
        if not samples:
            return before
        assert spec.target_kl is not None
        return steered(before, divergence=total / samples, samples=samples, target=spec.target_kl, horizon=spec.horizon)
