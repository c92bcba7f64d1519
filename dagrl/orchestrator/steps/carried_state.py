"""State that passes from step to step and is part of checkpoints: prompts, KL weights and baselines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dagrl.algorithms.reward_shaping import steered
from dagrl.config.schema import AdvantageNode, KlInRewardSpec, Pipeline
from dagrl.data.stats import Stat
from dagrl.graph.dag import PROMPTS_NODE
from dagrl.orchestrator.folder.checkpoint import RunState, Score
from dagrl.orchestrator.folder.identity import model_identity
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.orchestrator.steps.prompt_feed import PartialRolloutBuffer, PromptFeed
from dagrl.scheduler.commands import Run
from dagrl.scheduler.plan import PlannedTask, Rows
from dagrl.validation.prepare import PreparedPipeline
from dagrl.workers.messages import Block

DIVERGENCE = "kl/reward_divergence"
"""The controlled statistic: the mean over a response's tokens, for each response."""


class KlControl:
    """The KL weights of all advantage nodes with a ``target_kl``.

    A step's weight depends on the divergence of an earlier step that has always ended: the previous one, or one
    ``schedule.max_staleness`` steps further back. It is therefore reproducible, also after a resume.
    """

    def __init__(self, pipeline: Pipeline, kept: Mapping[str, Sequence[float]], first_step: int) -> None:
        """`kept`: the result of `after` for the step before `first_step`; empty at the start of a run."""
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
        """Node -> step -> weight, for the steps whose weight is known."""
        self._measured: dict[tuple[str, int], dict[tuple[int, ...], Stat]] = {}
        """Node and step -> shards -> statistic."""

    def weight(self, node: str, step: int) -> float | None:
        return self._weight(node, step) if node in self._specs else None

    def add(self, node: str, step: int, block: Block) -> None:
        if node in self._specs:
            for name, stat in block.stats.items():
                if name.endswith(DIVERGENCE):
                    self._measured.setdefault((node, step), {})[block.shards] = stat

    def after(self, step: int) -> dict[str, tuple[float, ...]]:
        """For the checkpoint of `step`: the weights of later steps that depend on earlier ones."""
        steps = range(step + 1, step + 1 + self._lag)
        return {name: tuple(self._weight(name, later) for later in steps) for name in self._specs}

    def commit(self, step: int) -> None:
        """Drop the measurements that no later weight depends on."""
        for name in self._specs:
            self._weight(name, step + 1)
            self._weights[name] = {later: weight for later, weight in self._weights[name].items() if later > step}
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


BASELINE = "baseline/"
"""Prefix of the statistics that hold the baseline of each role after a step."""


class RoleBaselines:
    """The baselines of all advantage nodes with ``estimator: rae``.

    These nodes run in the order of steps (`PlannedTask.in_order`), so the baselines of a step are the ones after the
    previous step, for any staleness, and a resumed run continues with them.
    """

    def __init__(self, pipeline: Pipeline, kept: Mapping[str, Mapping[str, float]], first_step: int) -> None:
        """`kept`: the result of `after` for the step before `first_step`; empty at the start of a run."""
        self._after: dict[str, dict[int, Mapping[str, float]]] = {
            name: {first_step - 1: kept.get(name, {})}
            for name, node in pipeline.nodes.items()
            if isinstance(node, AdvantageNode) and node.estimator == "rae"
        }
        """Node -> step -> role -> baseline, for the last committed step and later ones."""

    def before(self, node: str, step: int) -> Mapping[str, float]:
        """Role -> baseline at the start of a step; empty for nodes without baselines."""
        return self._newest(self._after[node], step - 1) if node in self._after else {}

    def add(self, task: PlannedTask, step: int, block: Block) -> None:
        if task.node in self._after:
            prefix = task.metric_prefix + BASELINE
            self._after[task.node][step] = {
                name.removeprefix(prefix): stat.total for name, stat in block.stats.items() if name.startswith(prefix)
            }

    def after(self, step: int) -> dict[str, dict[str, float]]:
        return {node: dict(self._newest(steps, step)) for node, steps in self._after.items()}

    def commit(self, step: int) -> None:
        """Drop the baselines of earlier steps."""
        for node, steps in self._after.items():
            newest = self._newest(steps, step)
            self._after[node] = {step: newest} | {later: kept for later, kept in steps.items() if later > step}

    @staticmethod
    def _newest(steps: Mapping[int, Mapping[str, float]], step: int) -> Mapping[str, float]:
        return steps[max(earlier for earlier in steps if earlier <= step)]


class CarriedState:
    """The state of all open steps that later steps depend on."""

    def __init__(self, prepared: PreparedPipeline, start: RunState, note: Callable[[str], None]) -> None:
        """`start`: the state before the first step. Raises RunError."""
        pipeline, first_step = prepared.loaded.pipeline, start.step + 1
        self._model = model_identity(pipeline)
        reads = any(task.op == PROMPTS_NODE and task.rows is Rows.TRAIN for task in prepared.plan.tasks)
        self.feed = PromptFeed(prepared, start, note) if reads else None
        """None if the run reads no prompts for training."""
        self.partial_rollouts = self.feed.partial_rollouts if self.feed else PartialRolloutBuffer()
        self.keeps_partial = any(node.partial_rollout for node in pipeline.rollouts.values())
        self.kl = KlControl(pipeline, start.kl_weights, first_step)
        self.baselines = RoleBaselines(pipeline, start.baselines, first_step)

    def add(self, run: Run, task: PlannedTask, block: Block, batch: BatchIndex) -> None:
        self.kl.add(task.node, run.step, block)
        self.baselines.add(task, run.step, block)
        if self.feed and task.rows is Rows.TRAIN:
            self.feed.learn(run, block, batch)

    def end_step(self, step: int, metrics: Mapping[str, float], *, validated: bool) -> dict[str, float]:
        """Update the order of prompts from a step's metrics; returns the metrics of the prompts. Raises RunError."""
        if self.feed is None:
            return {}
        own = self.feed.metrics(step)
        self.feed.learn_metrics(step, {**metrics, **own}, validated=validated)
        return own

    def after(self, step: int, score: Score | None, experience: Mapping[str, int]) -> RunState:
        carried = self.partial_rollouts.after(step)
        return RunState(
            step,
            self._model,
            self.feed.after(step) if self.feed else {},
            tuple(prompt.prompt for prompt in carried),
            score,
            self.kl.after(step),
            tuple(prompt.sampled for prompt in carried),
            experience,
            self.baselines.after(step),
        )

    def commit(self, step: int) -> None:
        """Drop the state that only `step` and earlier steps need."""
        if self.feed:
            self.feed.commit(step)
        self.kl.commit(step)
        self.baselines.commit(step)
