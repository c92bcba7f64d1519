"""The record of a running step: statistics, time spans and usage, which become metrics and a timeline."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dagrl.data.stats import Stat, merge
from dagrl.orchestrator.steps.account import StepAccount
from dagrl.scheduler.commands import Run
from dagrl.scheduler.intervals import Activity, Interval, busy_seconds
from dagrl.scheduler.plan import HOST, Executor, PlannedTask, WorkerId
from dagrl.workers.messages import Block, Usage

_COUNTED = ("sum",)
_DETAILS = {
    "reward": ("mean", "std"),
    **dict.fromkeys(("prompt_tokens", "response_tokens", "demonstration_tokens"), ("mean", "max")),
    "turns": ("mean", "max"),
    **dict.fromkeys(("staleness", "staleness/tokens"), ("mean", "max")),
    "staleness/masked": _COUNTED,
    **dict.fromkeys(("data/dropped_prompts", "data/cut_prompts"), _COUNTED),
    "rollout/carried_prompts": _COUNTED,
    **dict.fromkeys(("mismatch/logprob_diff", "mismatch/prob_diff", "mismatch/ratio"), ("mean", "max")),
    "buffer/age": ("mean", "max"),
    "correction/weight": ("mean", "std", "max"),
}
"""Statistics with more than a mean. A sum has the name of the statistic itself, like a mean alone."""


def _details(name: str) -> tuple[str, ...] | None:
    """The details of a statistic. ``val/`` or a node's name may precede its name."""
    parts = name.split("/")
    endings = ("/".join(parts[begin:]) for begin in range(len(parts)))
    return next((_DETAILS[ending] for ending in endings if ending in _DETAILS), None)


@dataclass(slots=True)
class TaskUsage:
    """Time that all runs of one task in a step have used of its ranks."""

    ranks: int = 0
    """Ranks of the task's engine, idle ones included."""
    _spans: list[Interval] = field(default_factory=list)
    _usages: list[Usage] = field(default_factory=list)

    def add(self, span: Interval, usage: Usage) -> None:
        self._spans.append(span)
        self._usages.append(usage)

    def metrics(self, task: str) -> dict[str, float]:
        """Metrics of the task. What is unknown on any rank is left out."""
        rank_seconds = busy_seconds(self._spans) * self.ranks
        if rank_seconds <= 0:
            return {}
        tokens = sum(usage.tokens for usage in self._usages)
        metrics = {f"throughput/{task}_tokens_per_s_per_gpu": tokens / rank_seconds}
        flops = [usage.flops for usage in self._usages if usage.flops is not None]
        peaks = [usage.peak_flops_per_s for usage in self._usages if usage.peak_flops_per_s is not None]
        if len(flops) == len(peaks) == len(self._usages):
            # A group has GPUs of one kind. If not, the best one gives the honest MFU.
            metrics[f"mfu/{task}"] = sum(flops) / (rank_seconds * max(peaks))
        memory = [usage.peak_bytes for usage in self._usages if usage.peak_bytes is not None]
        if memory:
            metrics[f"memory/{task}_peak_gib"] = max(memory) / 2**30
        return metrics


@dataclass(slots=True)
class StepRecord:
    """One step so far."""

    step: int
    account: StepAccount = field(default_factory=lambda: StepAccount(1, {}))
    """The ends of the samples that the step's rollouts generate."""
    driver_bytes: int = 0
    """Size of all messages to and from workers."""
    activities: list[Activity] = field(default_factory=list)
    _began: float = field(default_factory=time.time)
    _stats: list[dict[str, Stat]] = field(default_factory=list)
    _spans: dict[Run, list[tuple[tuple[int, ...], Interval, WorkerId]]] = field(default_factory=dict)
    _busy: dict[str, list[Interval]] = field(default_factory=dict)
    _usages: dict[str, TaskUsage] = field(default_factory=dict)
    _freed_gib: dict[str, float] = field(default_factory=dict)

    def count_bytes(self, nbytes: int) -> None:
        self.driver_bytes += nbytes

    def add_block(self, run: Run, block: Block, worker: WorkerId) -> None:
        self._stats.append(block.stats)
        self._spans.setdefault(run, []).append((block.shards, block.span, worker))
        self._busy.setdefault(run.task, []).append(block.span)
        if block.usage is not None:
            self._usages.setdefault(run.task, TaskUsage()).add(block.span, block.usage)

    def finish_run(self, run: Run, task: PlannedTask, executor: Executor) -> None:
        """Turn the spans of a run's ranks into one activity for each shard, or for the whole batch."""
        if task.name in self._usages:
            self._usages[task.name].ranks = executor.ranks
        by_shard: dict[int | None, list[tuple[Interval, WorkerId]]] = {}
        for shards, span, worker in self._spans.pop(run, []):
            # A block of a rollout may have rows of several shards, or none.
            for shard in shards if task.streams or len(shards) == 1 else (None,):
                by_shard.setdefault(shard, []).append((span, worker))
        for shard, spans in by_shard.items():
            start, end = min(span.start for span, _ in spans), max(span.end for span, _ in spans)
            group = executor.group or HOST
            self.activities.append(Activity(task.name, task.op, start, end, self.step, shard, group, spans[0][1]))

    def add(self, activity: Activity) -> None:
        self._busy.setdefault(activity.name, []).append(Interval(activity.start, activity.end))
        self.activities.append(activity)

    def add_number(self, name: str, number: float) -> None:
        self._stats.append({name: Stat.of([number])})

    def add_freed(self, executor: str, gib: float) -> None:
        """Add the memory that an executor has freed on each GPU. The maximum of a step counts."""
        self._freed_gib[executor] = max(gib, self._freed_gib.get(executor, gib))

    def metrics(
        self, tokens: int, policy_version: int, slots: int, last_commit: float | None = None
    ) -> dict[str, float]:
        """The step's metrics. `slots`: the GPUs, or CPU slots, of all groups.

        Steps overlap, so ``time/step_s`` starts at the `last_commit`, in seconds since the epoch, if that is later.
        """
        seconds = time.time() - max(self._began, last_commit or self._began)
        metrics: dict[str, float] = {"policy_version": policy_version, **self.measured()}
        metrics["time/step_s"] = seconds
        metrics.update({f"time/{name}_s": busy_seconds(spans) for name, spans in self._busy.items()})
        metrics["throughput/tokens_per_s"] = tokens / seconds
        metrics["throughput/tokens_per_s_per_gpu"] = tokens / seconds / slots
        for name, use in self._usages.items():
            metrics.update(use.metrics(name))
        metrics.update({f"memory/{executor}_freed_gib": gib for executor, gib in self._freed_gib.items()})
        metrics["driver/bytes"] = self.driver_bytes
        return metrics

    def measured(self) -> dict[str, float]:
        """The statistics of all nodes so far."""
        metrics: dict[str, float] = {}
        for name, stat in merge(self._stats).items():
            details = _details(name)
            if details is None:
                metrics[name] = stat.mean
                continue
            if details == _COUNTED:
                metrics[name] = stat.total
                continue
            values = {"mean": stat.mean, "std": stat.std, "max": stat.high}
            metrics.update({f"{name}/{detail}": values[detail] for detail in details})
        return metrics
