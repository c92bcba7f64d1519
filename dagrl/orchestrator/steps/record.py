"""What is kept of a step while it runs: its statistics and its spans, until they become metrics and a timeline."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dagrl.data.stats import Stat, merge
from dagrl.orchestrator.steps.efficiency import TaskUse
from dagrl.scheduler.commands import Run
from dagrl.scheduler.intervals import busy_seconds
from dagrl.scheduler.plan import HOST, Executor, PlannedTask
from dagrl.workers.messages import Block, Span

_COUNTED = ("sum",)
_DETAILS = {
    "reward": ("mean", "std"),
    **dict.fromkeys(("response_tokens", "demonstration_tokens"), ("mean", "max")),
    "turns": ("mean", "max"),
    "staleness": ("mean", "max"),
    **dict.fromkeys(("staleness/masked", "staleness/dropped"), _COUNTED),
    **dict.fromkeys(("data/dropped_prompts", "data/cut_prompts"), _COUNTED),
    **dict.fromkeys(("rollout/aborted_prompts", "rollout/aborted_tokens", "rollout/carried_prompts"), _COUNTED),
    **dict.fromkeys(("mismatch/logprob_diff", "mismatch/prob_diff", "mismatch/ratio"), ("mean", "max")),
    "correction/weight": ("mean", "std", "max"),
}
"""Statistics that do not only give their mean. What is counted is called as the statistic itself, like a mean alone."""


def _details(name: str) -> tuple[str, ...] | None:
    """What is told of a statistic, whoever it is of: ``val/``, or a node's name, may come before it."""
    parts = name.split("/")
    endings = ("/".join(parts[begin:]) for begin in range(len(parts)))
    return next((_DETAILS[ending] for ending in endings if ending in _DETAILS), None)


@dataclass(frozen=True, slots=True)
class Activity:
    """That something ran, from `start` to `end` in seconds since the epoch."""

    name: str
    category: str
    start: float
    end: float
    shard: int | None
    """None: all of the step's batch."""
    group: str
    worker: str


@dataclass(slots=True)
class StepRecord:
    """One step so far."""

    step: int
    position: int | None = None
    """Prompts of the data set used when the step had its own, over all epochs."""
    driver_bytes: int = 0
    """What went through the driver: messages, never columns."""
    activities: list[Activity] = field(default_factory=list)
    _began: float = field(default_factory=time.time)
    _stats: list[dict[str, Stat]] = field(default_factory=list)
    _spans: dict[Run, list[tuple[tuple[int, ...], Span, str]]] = field(default_factory=dict)
    _busy: dict[str, list[Span]] = field(default_factory=dict)
    _uses: dict[str, TaskUse] = field(default_factory=dict)
    _freed_gib: dict[str, float] = field(default_factory=dict)

    def went_through(self, nbytes: int) -> None:
        """Count a message to or from a worker."""
        self.driver_bytes += nbytes

    def note(self, run: Run, block: Block, worker: str) -> None:
        """Keep what a block says beside its rows."""
        self._stats.append(block.stats)
        self._spans.setdefault(run, []).append((block.shards, block.span, worker))
        self._busy.setdefault(run.task, []).append(block.span)
        if block.effort is not None:
            self._uses.setdefault(run.task, TaskUse()).add(block.span, block.effort)

    def finish_run(self, run: Run, task: PlannedTask, executor: Executor) -> None:
        """Turn the spans of a run's ranks into one event for each shard, or for all of the batch."""
        if task.name in self._uses:
            self._uses[task.name].ranks = executor.ranks
        by_shard: dict[int | None, list[tuple[Span, str]]] = {}
        for shards, span, worker in self._spans.pop(run, []):
            # What comes in pieces may have rows of several shards in one, and of none.
            for shard in shards if task.streams or len(shards) == 1 else (None,):
                by_shard.setdefault(shard, []).append((span, worker))
        for shard, spans in by_shard.items():
            start, end = min(span.start for span, _ in spans), max(span.end for span, _ in spans)
            group = executor.group or HOST
            self.activities.append(Activity(task.name, task.op, start, end, shard, group, spans[0][1]))

    def add(self, activity: Activity) -> None:
        """Keep that something ran."""
        self._busy.setdefault(activity.name, []).append(Span(activity.start, activity.end))
        self.activities.append(activity)

    def count(self, name: str, number: float) -> None:
        """Keep a number that nobody adds to."""
        self._stats.append({name: Stat.of([number])})

    def freed(self, executor: str, gib: float) -> None:
        """Keep what a sleeping executor has given back on each GPU; of several times in a step, the most."""
        self._freed_gib[executor] = max(gib, self._freed_gib.get(executor, gib))

    def metrics(
        self, tokens: int, policy_version: int, slots: int, last_commit: float | None = None
    ) -> dict[str, float]:
        """The step's metrics by the names of the contract; `slots` are the GPUs, or CPU slots, of all groups.

        ``time/step_s`` is what the step adds to the run: steps overlap, and one that began before the `last_commit`,
        in seconds since the epoch, counts from then on.
        """
        seconds = time.time() - max(self._began, last_commit or self._began)
        found: dict[str, float] = {"policy_version": policy_version, **self.measured()}
        found["time/step_s"] = seconds
        found.update({f"time/{name}_s": busy_seconds(spans) for name, spans in self._busy.items()})
        found["throughput/tokens_per_s"] = tokens / seconds
        found["throughput/tokens_per_s_per_gpu"] = tokens / seconds / slots
        for name, use in self._uses.items():
            found.update(use.metrics(name))
        found.update({f"memory/{executor}_freed_gib": gib for executor, gib in self._freed_gib.items()})
        found["driver/bytes"] = self.driver_bytes
        return found

    def measured(self) -> dict[str, float]:
        """What the nodes have told so far."""
        found: dict[str, float] = {}
        for name, stat in merge(self._stats).items():
            details = _details(name)
            if details is None:
                found[name] = stat.mean
                continue
            if details == _COUNTED:
                found[name] = stat.total
                continue
            values = {"mean": stat.mean, "std": stat.std, "max": stat.high}
            found.update({f"{name}/{detail}": values[detail] for detail in details})
        return found
