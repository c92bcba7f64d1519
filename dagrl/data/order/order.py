"""The order of a run's training prompts, step by step, with the state for a resumed run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dagrl.config.share import ALL, Share
from dagrl.data.order.sampler import Outcome, Sampler, SourceRows, State, prompt_id, row_of, source_of


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The order after the takes of a step."""

    sampler: dict[str, object]
    unusable: tuple[int, ...]
    """Number of rows of each source that were known to be too long."""
    passed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Learnt:
    outcomes: dict[int, Outcome]
    metrics: dict[str, float]


class PromptOrder:
    """Chooses the prompts of each step.

    The choice for a step depends on the outcomes of the steps up to ``step - 1 - staleness``, in the order of the
    steps, and on nothing later: the sequence does not depend on time, and a resumed run continues it.
    """

    def __init__(
        self,
        sampler: Sampler,
        sources: Sequence[SourceRows],
        staleness: int,
        *,
        share: Share = ALL,
        kind: str = "",
        limits: str = "",
    ) -> None:
        """`share` of the rows of each source that the sampler takes. `kind` of the sampler, which can continue a state
        of this kind. `limits`: the settings that make prompts too long.
        """
        self.sampler, self._share, self._kind = sampler, share, kind
        self._sources, self._lag, self._limits = list(sources), 1 + staleness, limits
        self._dropped: list[dict[int, None]] = [{} for _ in sources]
        """Rows that are too long, in the order of their detection."""
        self._learnt: dict[int, _Learnt] = {}
        self._observed = 0
        """The newest step whose outcomes the sampler has."""
        self._snapshots: dict[int, _Snapshot] = {}

    @property
    def rows(self) -> int:
        """Rows of all sources: an epoch ends when this many prompts were taken or passed over."""
        return sum(source.rows for source in self._sources)

    def newest_needed(self, step: int) -> int:
        """The newest step whose outcomes and metrics `step` needs."""
        return step - self._lag

    def take(self, step: int, count: int) -> list[int]:
        """Ids of the next prompts. Raises ValueError if a source has no usable prompt, and errors of the sampler."""
        self._observe(step)
        for source in range(len(self._sources)):
            self._check_usable(source)
        return self._noted(step, self.sampler.take(count, step, self._dropped) if count else [])

    def replace(self, step: int, ids: Sequence[int], dropped: Collection[int]) -> list[int]:
        """`ids` of `step` with further prompts in place of ones that are too long. Raises ValueError like `take`.

        The prompts of a source stay in its order: replacements come last.
        """
        for prompt in dropped:
            self._dropped[source_of(prompt)][row_of(prompt)] = None
        gone, rows = frozenset(dropped), dict[int, list[int]]()
        for prompt in ids:
            rows.setdefault(source_of(prompt), [])
            if prompt not in gone:
                rows[source_of(prompt)].append(prompt)
        sources = [source_of(prompt) for prompt in ids]
        for source, kept in sorted(rows.items()):
            if missing := sources.count(source) - len(kept):
                self._check_usable(source)
                kept += self.sampler.replace(source, missing, step, self._dropped)
        places = {source: iter(kept) for source, kept in rows.items()}
        return self._noted(step, [next(places[source]) for source in sources])

    def ahead(self, step: int, count: int) -> list[int]:
        """Ids that the first take of `step` will probably return; empty if the sampler cannot predict them."""
        if not self.sampler.foresees:
            return []
        state = self.sampler.state()
        ids = self.sampler.take(count, step, self._dropped)
        self.sampler.load(state, [source.name for source in self._sources])
        return ids

    def learn(self, step: int, outcomes: Sequence[Outcome] = (), metrics: Mapping[str, float] | None = None) -> None:
        """Add the outcomes of `step`. A later outcome of the same prompt replaces an earlier one."""
        learnt = self._learnt.setdefault(step, _Learnt({}, {}))
        if self.sampler.observes:
            learnt.outcomes.update((outcome.prompt, outcome) for outcome in outcomes)
        given = metrics or {}
        learnt.metrics.update((name, given[name]) for name in self.sampler.metrics if name in given)

    def epochs(self, step: int) -> dict[str, float]:
        """Passes over each source after `step`."""
        passed = self._snapshots[step].passed
        return {
            source.name: count / source.rows if source.rows else 0.0
            for source, count in zip(self._sources, passed, strict=True)
        }

    def passed(self, step: int) -> int:
        """Prompts that were taken or passed over up to `step`, over all epochs."""
        return sum(self._snapshots[step].passed)

    def commit(self, step: int) -> None:
        """Called when no checkpoint of `step` or earlier will be written any more."""
        self._snapshots.pop(step, None)
        # Later checkpoints hold the outcomes that their steps have not used, and later takes use the others.
        done = min(self._observed, self.newest_needed(step + 1))
        self._learnt = {earlier: learnt for earlier, learnt in self._learnt.items() if earlier > done}

    # -- checkpoints

    def after(self, step: int) -> State:
        """The state after the takes of `step`, in JSON types."""
        snapshot = self._snapshots[step]
        newest = self.newest_needed(step)
        learnt = {
            str(earlier): {
                "outcomes": [asdict(outcome) for outcome in learnt.outcomes.values()],
                "metrics": learnt.metrics,
            }
            for earlier, learnt in self._learnt.items()
            if newest < earlier <= step
        }
        dropped = [list(rows)[:count] for rows, count in zip(self._dropped, snapshot.unusable, strict=True)]
        return {
            "sources": [source.name for source in self._sources],
            "kind": self._kind,
            "sampler": _plain(snapshot.sampler),
            "passed": sum(snapshot.passed),
            "limits": self._limits,
            "dropped": dropped,
            "observed": max(0, newest),
            "learnt": learnt,
        }

    def load(self, state: Mapping[str, Any]) -> str:
        """Continue from the state of a checkpoint; returns a note if the order starts anew.

        Sources may have been added or removed since. Raises ValueError for a checkpoint of a version without an order.
        """
        if "position" in state:
            raise ValueError(
                "the checkpoint is of a version of dagrl that kept no order of prompts; resume it with that version, "
                "or train its weights (`dagrl export`) in another run folder"
            )
        self._observed = state["observed"]
        if state["kind"] != self._kind:
            return f"data.order was {state['kind']} before, and is {self._kind} now: the new order begins anew"
        names: list[str] = state["sources"]
        index = self._indices(names)
        self.sampler.load(state["sampler"], names)
        if state["limits"] == self._limits:
            for old, rows in enumerate(state["dropped"]):
                if old in index:
                    known = self._sources[index[old]].rows
                    self._dropped[index[old]] = dict.fromkeys(row for row in rows if row < known)
        for step, learnt in state["learnt"].items():
            outcomes = [
                replace(outcome, prompt=prompt_id(index[source_of(outcome.prompt)], row_of(outcome.prompt)))
                for outcome in (Outcome(**fields) for fields in learnt["outcomes"])
                if source_of(outcome.prompt) in index
            ]
            self.learn(int(step), outcomes, learnt["metrics"])
        return ""

    def ids_of(self, prompts: Sequence[int], state: Mapping[str, Any]) -> list[int | None]:
        """The ids in this run of prompts of the run of `state`; None if the source was removed."""
        index = self._indices(state["sources"])
        return [
            prompt_id(index[source_of(prompt)], row_of(prompt)) if source_of(prompt) in index else None
            for prompt in prompts
        ]

    def _indices(self, names: Sequence[str]) -> dict[int, int]:
        mine = {source.name: index for index, source in enumerate(self._sources)}
        return {old: mine[name] for old, name in enumerate(names) if name in mine}

    # -- steps

    def _observe(self, step: int) -> None:
        for earlier in range(self._observed + 1, self.newest_needed(step) + 1):
            learnt = self._learnt.get(earlier, _Learnt({}, {}))
            # Sorted by id, because workers report in any order.
            outcomes = [learnt.outcomes[prompt] for prompt in sorted(learnt.outcomes)]
            self.sampler.observe(earlier, outcomes, learnt.metrics)
            self._observed = earlier

    def _noted(self, step: int, ids: list[int]) -> list[int]:
        unusable = tuple(len(rows) for rows in self._dropped)
        self._snapshots[step] = _Snapshot(self.sampler.state(), unusable, tuple(self.sampler.passed()))
        return ids

    def _check_usable(self, source: int) -> None:
        spec = self._sources[source]
        if len(self._dropped[source]) >= (rows := self._share.rows(spec.rows)) > 0:
            raise ValueError(
                f"data.train: none of the {rows:,} prompts of `{spec.name}` fits data.max_prompt_tokens; raise "
                "that, or set data.overlong_prompts: cut"
            )


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
