"""The open steps: the batches and the record of each, whose statistics and spans become metrics and a timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dagrl.config.errors import suggest
from dagrl.config.schema import Pipeline
from dagrl.data.order.sampler import source_of
from dagrl.data.stats import Stat, merge
from dagrl.orchestrator.steps.account import StepAccount, rollout_facts
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.scheduler.commands import Run
from dagrl.scheduler.intervals import Activity, Interval, busy_seconds
from dagrl.scheduler.plan import HOST, Executor, Plan, PlannedTask, Rows, WorkerId
from dagrl.workers.messages import Block, Usage

_COUNTED = ("sum",)
_DETAILS: dict[str, tuple[str, ...] | None] = {
    "reward": ("mean", "std"),
    # The fraction of rewards that failed.
    "failed/reward": None,
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
"""Statistics with more than a mean. A sum has the name of the statistic itself, like a single mean."""


def _details(name: str) -> tuple[str, ...] | None:
    """The details of a statistic. ``val/`` or a node's name may precede its name."""
    parts = name.split("/")
    endings = ("/".join(parts[begin:]) for begin in range(len(parts)))
    return next((_DETAILS[ending] for ending in endings if ending in _DETAILS), None)


def usage_metrics(task: str, ranks: int, blocks: Sequence[tuple[Interval, Usage]]) -> dict[str, float]:
    """Metrics of all runs of a task in a step, on `ranks` ranks. A value that is unknown on a rank is omitted."""
    rank_seconds = busy_seconds(span for span, _ in blocks) * ranks
    if rank_seconds <= 0:
        return {}
    usages = [usage for _, usage in blocks]
    metrics = {f"throughput/{task}_tokens_per_s_per_gpu": sum(usage.tokens for usage in usages) / rank_seconds}
    flops = [usage.flops for usage in usages if usage.flops is not None]
    peaks = [usage.peak_flops_per_s for usage in usages if usage.peak_flops_per_s is not None]
    if len(flops) == len(peaks) == len(usages):
        # A group usually has GPUs of one kind. Otherwise the fastest one determines the MFU.
        metrics[f"mfu/{task}"] = sum(flops) / (rank_seconds * max(peaks))
    memory = [usage.peak_bytes for usage in usages if usage.peak_bytes is not None]
    if memory:
        metrics[f"memory/{task}_peak_gib"] = max(memory) / 2**30
    return metrics


def without_metric(key: str, step: int, name: str, measured: Iterable[str]) -> str:
    """The message that a step has no metric of the name that a key of the pipeline file gives."""
    return f"{key}: step {step} has no metric {name}; {suggest(name, sorted(measured))}"


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
    _usages: dict[str, list[tuple[Interval, Usage]]] = field(default_factory=dict)
    _ranks: dict[str, int] = field(default_factory=dict)
    """Task -> ranks of its engine, idle ones included."""
    _freed_gib: dict[str, float] = field(default_factory=dict)

    def count_bytes(self, nbytes: int) -> None:
        self.driver_bytes += nbytes

    def add_block(self, run: Run, block: Block, worker: WorkerId) -> None:
        self._stats.append(block.stats)
        self._spans.setdefault(run, []).append((block.shards, block.span, worker))
        self._busy.setdefault(run.task, []).append(block.span)
        if block.usage is not None:
            self._usages.setdefault(run.task, []).append((block.span, block.usage))

    def finish_run(self, run: Run, task: PlannedTask, executor: Executor) -> None:
        """Turn the spans of a run's ranks into one activity for each shard, or for the whole batch."""
        self._ranks[task.name] = executor.ranks
        by_shard: dict[int | None, list[tuple[Interval, WorkerId]]] = {}
        for shards, span, worker in self._spans.pop(run, []):
            # A block of a rollout may have rows of several shards, or none.
            for shard in shards if task.streams or len(shards) == 1 else (None,):
                by_shard.setdefault(shard, []).append((span, worker))
        for shard, spans in by_shard.items():
            start, end = min(span.start for span, _ in spans), max(span.end for span, _ in spans)
            group = executor.group or HOST
            self.activities.append(Activity(task.name, task.op, start, end, self.step, shard, group, spans[0][1]))

    def add_move(self, name: str, executor: Executor, start: float) -> None:
        """Add a move of an executor, such as ``sync``, from `start`, in seconds since the epoch, until now."""
        end, worker = time.time(), WorkerId(executor.name, 0)
        self._busy.setdefault(name, []).append(Interval(start, end))
        self.activities.append(Activity(name, name, start, end, self.step, None, executor.group or HOST, worker))

    def add_number(self, name: str, number: float) -> None:
        self._stats.append({name: Stat.of([number])})

    def add_freed(self, executor: str, gib: float) -> None:
        """Add the memory that an executor freed on each GPU. The maximum of a step counts."""
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
        for name, blocks in self._usages.items():
            metrics.update(usage_metrics(name, self._ranks.get(name, 0), blocks))
        metrics.update({f"memory/{executor}_freed_gib": gib for executor, gib in self._freed_gib.items()})
        metrics["driver/bytes"] = self.driver_bytes
        return metrics

    def measured(self) -> dict[str, float]:
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


class OpenSteps:
    """The records and batches of the steps that are not committed."""

    def __init__(self, pipeline: Pipeline, plan: Plan) -> None:
        self._plan, self._facts = plan, rollout_facts(pipeline, plan)
        self._sources = [*pipeline.data.train_prefixes]
        self._records: dict[int, StepRecord] = {}
        self._batches: dict[tuple[int, Rows], BatchIndex] = {}

    def record(self, step: int) -> StepRecord:
        if step not in self._records:
            self._records[step] = StepRecord(step, StepAccount(self._plan.samples_per_prompt, self._facts))
        return self._records[step]

    def batch(self, step: int, rows: Rows) -> BatchIndex:
        if (step, rows) not in self._batches:
            self._batches[step, rows] = BatchIndex(self._plan.group_size(rows), self._plan.shards)
        return self._batches[step, rows]

    def tokens(self, step: int) -> int:
        return sum(batch.total_tokens for (number, _), batch in self._batches.items() if number == step)

    def account(self, step: int) -> dict[str, float]:
        """The ends of the samples of a step, whose training batch is complete; empty without one."""
        batch = self._batches.get((step, Rows.TRAIN))
        if batch is None:
            return {}
        return self.record(step).account.metrics(batch.groups_in(batch.all_rows), self._source_of(batch))

    def lost(self, committed: int) -> Iterator[dict[str, float]]:
        """The samples of each step after `committed`: the run ends without it."""
        for step in [step for step in self._records if step > committed]:
            yield self._records[step].account.metrics((), self._source_of(self.batch(step, Rows.TRAIN)))

    def drop(self, step: int) -> None:
        self._records.pop(step)
        for rows in Rows:
            self._batches.pop((step, rows), None)

    def _source_of(self, batch: BatchIndex) -> Callable[[int], str] | None:
        """From a group of the batch to the name of its source; None if there is a single one."""
        return (lambda group: self._sources[source_of(batch.prompt(group))]) if self._sources else None
