"""Baselines of roles: those that each step begins with, and what a checkpoint keeps. Pure.

Advantage nodes with ``estimator: rae`` run in the order of steps (`PlannedTask.in_order`), so the baselines of a step
are those after the step before, whatever the staleness, and a resumed run continues with them.
"""

from __future__ import annotations

from collections.abc import Mapping

from dagrl.config.schema import AdvantageNode, Pipeline
from dagrl.scheduler.plan import PlannedTask
from dagrl.workers.messages import Block

BASELINE = "baseline/"
"""Prefix of the statistics that hold the baseline of each role after a step."""


class RoleBaselines:
    """The baselines of all advantage nodes with ``estimator: rae``."""

    def __init__(self, pipeline: Pipeline, kept: Mapping[str, Mapping[str, float]], first_step: int) -> None:
        """`kept`: what `after` returned for the step before `first_step`; empty at the start of a run."""
        self._after: dict[str, dict[int, Mapping[str, float]]] = {
            name: {first_step - 1: kept.get(name, {})}
            for name, node in pipeline.nodes.items()
            if isinstance(node, AdvantageNode) and node.estimator == "rae"
        }
        """Node -> step -> role -> baseline, for steps that have none after them that is committed."""

    def before(self, node: str, step: int) -> Mapping[str, float]:
        """Role -> baseline at the begin of a step; empty for nodes without."""
        return self._newest(self._after[node], step - 1) if node in self._after else {}

    def add(self, task: PlannedTask, step: int, block: Block) -> None:
        """Add the baselines after a step, from the block of its task."""
        if task.node in self._after:
            prefix = task.metric_prefix + BASELINE
            self._after[task.node][step] = {
                name.removeprefix(prefix): stat.total for name, stat in block.stats.items() if name.startswith(prefix)
            }

    def after(self, step: int) -> dict[str, dict[str, float]]:
        """For the checkpoint of `step`."""
        return {node: dict(self._newest(steps, step)) for node, steps in self._after.items()}

    def commit(self, step: int) -> None:
        """Drop what only earlier steps begin with."""
        for node, steps in self._after.items():
            newest = self._newest(steps, step)
            self._after[node] = {step: newest} | {each: kept for each, kept in steps.items() if each > step}

    @staticmethod
    def _newest(steps: Mapping[int, Mapping[str, float]], step: int) -> Mapping[str, float]:
        return steps[max(each for each in steps if each <= step)]
