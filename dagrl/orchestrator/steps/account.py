"""The account of a step's samples: each generated sample has one end. Pure.

    generated + carried_in = trained + stale + filtered + failed + unused + carried_out

This holds in samples and in tokens, for each rollout and each source of data. A sample is generated in the step that
samples its first token. Its tokens have its end, except untrained tokens of a trained sample: tokens masked as too old
are ``stale``, tokens outside of an agent's rows ``unused``, tokens of an agent's failed attempts ``failed``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dagrl.config.schema import MixNode, Pipeline
from dagrl.graph.dag import EXPERIENCE_NODE
from dagrl.scheduler.plan import Plan, PlannedTask, Rows
from dagrl.tracking.metrics_file import ENDS
from dagrl.workers.messages import Block

_CARRIED = ("carried_in", "carried_out")
_COLUMNS = (
    *("generated", "generated_tokens", "carried_in", "carried_in_tokens"),
    # Ends of samples that began again in this step.
    *("stale", "stale_tokens", "failed", "failed_tokens"),
    # The tokens of the open sample, and its untrained tokens.
    *("masked", "held", "retried", "agent_failed"),
)


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """Facts about the samples of a rollout, from the pipeline."""

    prefix: str = ""
    rows_per_sample: int = 1
    trained: bool = True
    """Whether a node trains on its samples."""
    replaced: int = 0
    """Number of samples at the end of each group that ``mix`` replaces by expert responses."""
    carries: bool = False
    """Whether a later step continues unfinished samples."""


def rollout_facts(pipeline: Pipeline, plan: Plan) -> dict[str, RolloutFacts]:
    tasks = [task for task in plan.tasks if task.rows is Rows.TRAIN]
    facts = {}
    for task in tasks:
        node = pipeline.rollouts.get(task.node)
        if node is None:
            continue
        readers = [reader for reader in tasks if reader.sampled_by == task.node]
        mixes = [mix for reader in readers if isinstance(mix := pipeline.nodes.get(reader.node), MixNode)]
        facts[task.node] = RolloutFacts(
            task.metric_prefix,
            node.rows_per_sample,
            # The other part of a pipeline trains on experience.
            any(reader.trains or reader.op == EXPERIENCE_NODE for reader in readers),
            sum(mix.per_prompt for mix in mixes),
            node.partial_rollout,
        )
    return facts


class StepAccount:
    """The samples that the rollouts of one step generated or continued."""

    def __init__(self, group_size: int, facts: Mapping[str, RolloutFacts]) -> None:
        self._rollouts = {name: _Samples(fact, group_size // fact.rows_per_sample) for name, fact in facts.items()}
        self._ends: dict[int, str] = {}
        """Group -> the end of its samples; samples of other groups are trained if they are in the batch, else
        unused."""

    def rollout(self, name: str) -> _Samples:
        return self._rollouts[name]

    def end(self, groups: Iterable[int], end: str) -> None:
        """Note the end of all samples of these groups: filtered or carried_out."""
        self._ends |= dict.fromkeys(groups, end)

    def add_update(self, task: PlannedTask, block: Block) -> None:
        """Add the counts of a block from an update: see `dagrl.ops.update`."""
        if task.op == "update" and task.sampled_by in self._rollouts:
            # Without counts, nothing is too old: the update trains on each row.
            counts = block.counts or {"stale": np.zeros_like(block.rows), "kept": np.ones_like(block.rows)}
            self._rollouts[task.sampled_by].add_update(task.name, block.rows, counts)

    def metrics(self, batch: Sequence[int], source_of: Callable[[int], str] | None = None) -> dict[str, float]:
        """The metrics of a step whose batch are these groups; ``generated`` alone is right before the step's end.

        With `source_of`, which names the source of a group, also the metrics of each source.
        """
        metrics: dict[str, float] = {}
        for samples in self._rollouts.values():
            ids = samples.known()
            groups = samples.groups_of(ids).tolist()
            in_batch = set(batch)
            ends = [self._ends.get(group, "" if group in in_batch else "unused") for group in groups]
            counted = samples.counted(ids, np.array(ends, dtype=object))
            parts = {"": np.ones(len(ids), dtype=bool)}
            if source_of is not None:
                sources = np.array([source_of(group) for group in groups], dtype=object)
                parts |= {f"train/{name}/": sources == name for name in dict.fromkeys(sources.tolist())}
            for part, mine in parts.items():
                for name, column in counted.items():
                    metrics[f"{samples.facts.prefix}{part}{name}"] = float(column[mine].sum())
        return metrics


class _Samples:
    """The samples of one rollout, by number: a row's number over rows per sample."""

    def __init__(self, facts: RolloutFacts, per_group: int) -> None:
        self.facts = facts
        self._per_group = per_group
        self._live = np.zeros(0, dtype=np.int64)
        """Tokens of each open sample; -1 without one."""
        self._table = {name: np.zeros(0, dtype=np.int64) for name in _COLUMNS}
        self._updates: dict[str, list[tuple[np.ndarray, Mapping[str, np.ndarray]]]] = {}

    def known(self) -> np.ndarray:
        """The samples that this step has generated or taken over, int64, ascending."""
        return np.flatnonzero((self._live >= 0) | (self._table["generated"] > 0) | (self._table["carried_in"] > 0))

    def groups_of(self, ids: np.ndarray) -> np.ndarray:
        return ids // self._per_group

    def carry_in(self, group: int, tokens: Sequence[int]) -> None:
        """Take over a group's samples of an earlier step. `tokens` of each; -1: none."""
        ids = self._ids([group])
        self._live[ids] = tokens
        self._table["carried_in"][ids] = self._live[ids] >= 0
        self._table["carried_in_tokens"][ids] = np.maximum(self._live[ids], 0)

    def add(self, rows: np.ndarray, counts: Mapping[str, np.ndarray], *, finished: bool) -> None:
        """Add a rollout's counts of these rows: see `dagrl.ops.rollout`.

        Samples of an earlier step that were not continued have ended as too old, or lost with a worker.
        """
        ids, inverse = np.unique(rows // self.facts.rows_per_sample, return_inverse=True)
        self._reach(int(ids.max(initial=-1)) + 1)

        def total(name: str) -> np.ndarray:
            return np.bincount(inverse, counts.get(name), len(ids)).astype(np.int64) * (name in counts)

        new, live, table = total("sampled"), self._live[ids], self._table
        lost = (live >= 0) & (total("begun") == 0)
        outdated = total("outdated") > 0
        for end, which in (("stale", lost & outdated), ("failed", lost & ~outdated)):
            self._finish_early(ids[which], end)
        is_new = (live < 0) | lost
        exists = ~is_new | (new > 0) | finished
        table["generated"][ids] += is_new & exists
        table["generated_tokens"][ids] += new
        self._live[ids] = np.where(exists, np.where(is_new, 0, live) + new, -1)
        for name in ("masked", "retried", "agent_failed"):
            table[name][ids] = total(name)
        table["held"][ids] = total("held") if "held" in counts else self._live[ids]

    def lose(self, rows: np.ndarray, tokens: int) -> None:
        """Samples that a lost server did not report have failed. `tokens`: tokens that it sampled for these rows."""
        ids = np.unique(rows // self.facts.rows_per_sample)
        if not len(ids):
            return
        self._reach(int(ids.max()) + 1)
        new = tokens // len(ids) + (np.arange(len(ids)) < tokens % len(ids))
        is_new = (self._live[ids] < 0) & (new > 0)
        self._table["generated"][ids] += is_new
        self._table["generated_tokens"][ids] += new
        self._live[ids] = np.where(new > 0, np.maximum(self._live[ids], 0) + new, self._live[ids])
        self._finish_early(ids[self._live[ids] >= 0], "failed")

    def restart(self, groups: Sequence[int]) -> None:
        ids = self._ids(groups)
        self._finish_early(ids[self._live[ids] >= 0], "failed")

    def left(self, group: int) -> tuple[int, ...]:
        """Tokens of each sample of a group that a later step continues; -1: none."""
        ids = self._ids([group])
        return tuple(self._live[ids].tolist())

    def add_update(self, task: str, rows: np.ndarray, counts: Mapping[str, np.ndarray]) -> None:
        self._updates.setdefault(task, []).append((rows // self.facts.rows_per_sample, counts))

    def counted(self, ids: np.ndarray, ends: np.ndarray) -> dict[str, np.ndarray]:
        """The metrics of each sample. `ends`: the ends of their groups; empty for groups in the batch."""
        table = {name: column[ids] for name, column in self._table.items()}
        is_open, live = self._live[ids] >= 0, np.maximum(self._live[ids], 0)
        ends, in_batch = ends.copy(), ends == ""
        ends[in_batch & (self._replaced(ids, is_open) | (not self.facts.trained))] = "unused"
        ends[in_batch & (table["agent_failed"] > 0)] = "failed"
        held = np.minimum(live, table["held"])
        rest = np.maximum(held - table["masked"], 0)
        trained = rest - self._too_old(ids, rest)
        stale, retried = held - trained, np.minimum(table["retried"], live - held)
        ends[(ends == "") & (trained == 0) & (stale > 0)] = "stale"
        ends[ends == ""] = "trained"

        names = ("generated", *ENDS, *(_CARRIED if self.facts.carries else ()))
        samples, tokens = (
            {name: table.get(f"{name}{unit}", np.zeros(len(ids), dtype=np.int64)).copy() for name in names}
            for unit in ("", "_tokens")
        )
        for end in (*ENDS, "carried_out"):
            if (mine := is_open & (ends == end)).any():
                samples[end] += mine
                split = {end: live}
                if end == "trained":
                    split = {"trained": trained, "stale": stale, "unused": live - held - retried, "failed": retried}
                for name, count in split.items():
                    tokens[name] += np.where(mine, count, 0)
        return {f"samples/{name}": column for name, column in samples.items()} | {
            f"tokens/{name}": column for name, column in tokens.items()
        }

    def _too_old(self, ids: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """The number of `tokens` of each sample that are too old for every training node."""
        outdated = tokens
        for parts in self._updates.values():
            stale, kept = (
                np.bincount(
                    np.concatenate([samples for samples, _ in parts]),
                    np.concatenate([counts[name] for _, counts in parts]),
                    len(self._live),
                )[ids].astype(np.int64)
                for name in ("stale", "kept")
            )
            # Without a kept token, the whole sample is too old.
            outdated = np.minimum(outdated, np.where((stale > 0) & (kept == 0), tokens, stale))
        return outdated if self._updates else np.zeros_like(tokens)

    def _replaced(self, ids: np.ndarray, is_open: np.ndarray) -> np.ndarray:
        """Whether an expert's response replaces a sample (the last samples of each group), bool [ids]."""
        if not self.facts.replaced:
            return np.zeros(len(ids), dtype=bool)
        mine = np.flatnonzero(is_open)
        groups = self.groups_of(ids[mine])
        last = np.searchsorted(groups, groups, side="right")
        replaced = np.zeros(len(ids), dtype=bool)
        replaced[mine] = last - np.arange(len(mine)) <= self.facts.replaced
        return replaced

    def _finish_early(self, ids: np.ndarray, end: str) -> None:
        self._table[end][ids] += 1
        self._table[f"{end}_tokens"][ids] += self._live[ids]
        self._live[ids] = -1

    def _ids(self, groups: Sequence[int]) -> np.ndarray:
        self._reach((max(groups, default=-1) + 1) * self._per_group)
        first = np.array(groups, dtype=np.int64) * self._per_group
        return (first[:, None] + np.arange(self._per_group)).ravel()

    def _reach(self, count: int) -> None:
        if (more := count - len(self._live)) > 0:
            # At least double, so that adding all samples takes linear time.
            more = -(-max(more, len(self._live)) // self._per_group) * self._per_group
            self._live = np.concatenate([self._live, np.full(more, -1)])
            self._table = {name: np.pad(column, (0, more)) for name, column in self._table.items()}
