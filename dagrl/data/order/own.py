"""The user's own sampler: a class that decides which prompts each step takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from dagrl.data.order.sampler import Outcome, SourceRows, State, Unusable, prompt_id, row_of, source_of
from dagrl.plugins.calls import call_or_stop
from dagrl.plugins.sampler import check_sampler

_MOST_TRIES = 100


class OwnSampler:
    """A `Sampler` that calls the user's. Raises ValueError, with its place, for any error of it."""

    metrics: frozenset[str] = frozenset()
    foresees = False

    def __init__(
        self,
        made: Callable[..., object],
        place: str,
        args: Mapping[str, object],
        sources: Sequence[SourceRows],
        seed: int,
    ) -> None:
        """`made`: the class at `place`."""
        check_sampler(made, place, args)
        self._place, self._sources = place, list(sources)
        self.called = place
        """The last called part of the user's sampler: the class, or a method."""
        self._indices = {source.name: index for index, source in enumerate(sources)}
        rows = {source.name: source.rows for source in sources}
        self._sampler = call_or_stop(place, made, args, rows, seed)
        self.observes = hasattr(self._sampler, "observe")
        self._passed = [0] * len(sources)

    def take(self, count: int, step: int, unusable: Unusable) -> list[int]:
        ids: list[int] = []
        for _ in range(_MOST_TRIES):
            asked = count - len(ids)
            taken = self._ids(self._call("take", asked, step), asked)
            ids += [prompt for prompt in taken if row_of(prompt) not in unusable[source_of(prompt)]]
            if len(ids) == count:
                return self._counted(ids, step)
        raise ValueError(
            f"{self._place}.take returns, {_MOST_TRIES} times, prompts that are too long for data.max_prompt_tokens; "
            "return others, or set data.overlong_prompts: cut"
        )

    def replace(self, source: int, count: int, step: int, unusable: Unusable) -> list[int]:
        del source
        return self.take(count, step, unusable)

    def observe(self, step: int, outcomes: Sequence[Outcome], metrics: Mapping[str, float]) -> None:
        del metrics
        if self.observes:
            self._call("observe", [self._row(step, outcome) for outcome in outcomes])

    def passed(self) -> list[int]:
        return list(self._passed)

    def state(self) -> State:
        state = self._call("state")
        try:
            text = json.dumps(state)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{self._place}.state returns what JSON cannot hold ({error}); {_PLAIN}") from error
        if (key := _other_key(state)) is not None:
            raise ValueError(
                f"{self._place}.state returns a dict with the key {key!r}, which JSON makes text; {_PLAIN}"
            )
        return {"own": text, "passed": dict(zip(self._indices, self._passed, strict=True))}

    def load(self, state: State, sources: Sequence[str]) -> None:
        del sources
        self._passed = [state["passed"].get(name, 0) for name in self._indices]
        self._call("load", json.loads(state["own"]))

    def _call(self, method: str, *given: Any) -> Any:
        self.called = f"{self._place}.{method}"
        return call_or_stop(self.called, getattr(self._sampler, method), {}, *given)

    def _counted(self, ids: list[int], step: int) -> list[int]:
        doubles = len(ids) - len(set(ids))
        if doubles:
            twice = next(prompt for place, prompt in enumerate(ids) if prompt in ids[:place])
            shown = f"row {row_of(twice)} of {self._sources[source_of(twice)].name}"
            raise ValueError(f"{self._place}.take returns {shown} twice for step {step}; return different prompts")
        for prompt in ids:
            self._passed[source_of(prompt)] += 1
        return ids

    def _ids(self, taken: object, count: int) -> list[int]:
        if not isinstance(taken, list | tuple | np.ndarray):
            raise ValueError(f"{self._place}.take returns {type(taken).__name__}; return a list of {count} prompts")
        if len(taken) != count:
            raise ValueError(f"{self._place}.take returns {len(taken)} prompts, and must return {count}")
        return [self._id(prompt) for prompt in taken]

    def _id(self, taken: object) -> int:
        match taken:
            case bool():
                pass
            case int() | np.integer():
                source, row = source_of(int(taken)), row_of(int(taken))
                if 0 <= source < len(self._sources) and row < self._sources[source].rows:
                    return int(taken)
            case [str() as name, (int() | np.integer()) as row]:
                if name in self._indices and 0 <= row < self._sources[self._indices[name]].rows:
                    return prompt_id(self._indices[name], int(row))
        rows = ", ".join(f"{source.name} with {source.rows:,} rows" for source in self._sources)
        message = f"{self._place}.take returns {taken!r:.100}, which is no prompt"
        raise ValueError(f"{message}; return (source, row), or the id of an outcome; there are: {rows}")

    def _row(self, step: int, outcome: Outcome) -> dict[str, object]:
        source, row = source_of(outcome.prompt), row_of(outcome.prompt)
        return {**asdict(outcome), "source": self._sources[source].name, "row": row, "step": step}


_PLAIN = "return numbers, texts, lists, and dicts with texts as keys"


def _other_key(value: object) -> object:
    if isinstance(value, dict):
        other = next((key for key in value if not isinstance(key, str)), None)
        return other if other is not None else _other_key(list(value.values()))
    inner = (_other_key(item) for item in value) if isinstance(value, list | tuple) else ()
    return next((key for key in inner if key is not None), None)
