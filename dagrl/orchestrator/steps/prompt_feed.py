"""The prompts of each round of a step: unfinished prompts of earlier steps, then the next ones of the order."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat

from dagrl.config.schema.rounds import prompts_begun
from dagrl.config.share import ALL
from dagrl.data.order.make import make_order
from dagrl.data.order.own import OwnSampler
from dagrl.data.order.sampler import Outcome, source_of
from dagrl.ops.work import Carried, PausedGroup
from dagrl.orchestrator.folder.checkpoint import RunState
from dagrl.orchestrator.groups.task_group import run_with_notes
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.orchestrator.steps.record import StepRecord, without_metric
from dagrl.scheduler.commands import Run
from dagrl.validation.prepare import PreparedPipeline
from dagrl.workers.errors import RunError
from dagrl.workers.messages import Block


@dataclass(slots=True)
class _Prompt:
    carried: Carried
    left_by: int
    """The step that did not finish it."""
    taken_by: int | None = None
    taken_in: int = 0
    """The round of that step."""


class PartialRolloutBuffer:
    """Unfinished prompts, oldest first.

    Steps may overlap: a later step may have taken prompts that the checkpoint of an earlier one must hold.
    """

    def __init__(self, carried: Iterable[Carried] = ()) -> None:
        """The prompts of a checkpoint, whose tokens are lost."""
        self._prompts = [_Prompt(prompt, left_by=0) for prompt in carried]

    def take(self, step: int, most: int, round_: int = 0) -> tuple[int, ...]:
        waiting = [prompt for prompt in self._prompts if prompt.taken_by is None][:most]
        for prompt in waiting:
            prompt.taken_by, prompt.taken_in = step, round_
        return tuple(prompt.carried.prompt for prompt in waiting)

    def taken(self, step: int, round_: int = 0) -> list[Carried]:
        """The prompts that a round of `step` took, in order."""
        return [prompt.carried for prompt in self._prompts if (prompt.taken_by, prompt.taken_in) == (step, round_)]

    def drop_tokens(self) -> None:
        """The objects with the tokens may be lost: all prompts start again, except prompts of agents that continue."""
        for prompt in self._prompts:
            if not isinstance(prompt.carried.begun, PausedGroup):
                prompt.carried = prompt.carried._replace(begun=None)

    def add(self, step: int, prompts: Iterable[Carried]) -> None:
        self._prompts += [_Prompt(prompt, step) for prompt in prompts]

    def after(self, step: int) -> list[Carried]:
        return [
            prompt.carried
            for prompt in self._prompts
            if prompt.left_by <= step and (prompt.taken_by is None or prompt.taken_by > step)
        ]

    def commit(self, step: int) -> None:
        """Drop the prompts that `step` and earlier steps took."""
        self._prompts = [prompt for prompt in self._prompts if prompt.taken_by is None or prompt.taken_by > step]


class PromptFeed:
    """Gives prompts to the source, and outcomes to the order. Pure, except for the waits for metrics and user code."""

    def __init__(self, prepared: PreparedPipeline, start: RunState, note: Callable[[str], None]) -> None:
        loaded = prepared.loaded
        pipeline = loaded.pipeline
        self._sources = list(pipeline.data.sources)
        self._several = len(self._sources) > 1
        self._first_round = prompts_begun(pipeline)
        self._keeps_partial = any(node.partial_rollout for node in pipeline.rollouts.values())
        share = prepared.part.share if prepared.part else ALL
        with _failing("data.order"):
            self._order = make_order(pipeline, loaded.folder, share)
            if start.order and (changed := self._order.load(start.order)):
                note(changed)
            ids = self._order.ids_of(start.carried, start.order) if start.carried else ()
        # Checkpoints of earlier versions do not have the tokens.
        tokens = chain(start.carried_tokens, repeat(()))
        self.partial_rollouts = PartialRolloutBuffer(
            Carried(prompt, None, sampled) for prompt, sampled in zip(ids, tokens, strict=False) if prompt is not None
        )
        self._note, self._limit_s = note, pipeline.run.node_timeout_s
        self._end = pipeline.run.end_position(self._order.rows)
        self._known = start.step
        """The newest step whose metrics the order has."""
        self._metrics = asyncio.Event()
        self._read: dict[int, Counter[int]] = {}
        """Step -> number of prompts that it read from each source."""

    # -- prompts

    async def take(self, run: Run, count: int, record: StepRecord) -> list[int]:
        """Ids of the prompts of a round. Raises RunError."""
        needed = self._order.newest_needed(run.step) if self._order.sampler.metrics else 0
        while self._known < needed:
            self._metrics.clear()
            await self._metrics.wait()
        carried = self.partial_rollouts.take(run.step, count, run.round)
        if self._keeps_partial:
            record.add_number("rollout/carried_prompts", len(carried))
        return [*carried, *await self._call(run, lambda: self._order.take(run.step, count - len(carried)))]

    async def replace(self, run: Run, ids: Sequence[int], dropped: Sequence[int]) -> list[int]:
        """`ids` with further prompts in place of ones that are too long. Raises RunError."""
        return await self._call(run, lambda: self._order.replace(run.step, ids, dropped))

    async def _call(self, run: Run, function: Callable[[], list[int]]) -> list[int]:
        """Call the order. A user's sampler runs in a thread, so that the loop and Ctrl-C keep working."""
        sampler, place = self._order.sampler, _place(run)
        with _failing(place):
            if not isinstance(sampler, OwnSampler):
                return function()
            return await run_with_notes(function, lambda: sampler.called, self._note, self._limit_s, node=place)

    def ahead(self, run: Run) -> list[int]:
        return self._order.ahead(run.step + 1, self._first_round)

    def end_round(self, run: Run, ids: Sequence[int]) -> bool:
        """Called when a round has read these prompts. Returns whether ``run.epochs`` end with the step."""
        self._read.setdefault(run.step, Counter()).update(map(source_of, ids))
        return self._end is not None and self._order.passed(run.step) >= self._end

    # -- outcomes

    def learn(self, run: Run, block: Block, batch: BatchIndex) -> None:
        """Add the outcomes in a block of a filter, or of the step's sink."""
        measured = block.outcomes
        if measured is None or not self._order.sampler.observes:
            return
        columns = (measured.groups, measured.reward, measured.pass_rate, measured.advantage)
        outcomes = [
            Outcome(batch.prompt(group), _known(reward), _known(rate), _known(advantage), batch.tokens_of(group))
            for group, reward, rate, advantage in zip(*(column.tolist() for column in columns), strict=True)
            if not batch.is_returned(group)
        ]
        self._order.learn(run.step, outcomes)

    def learn_metrics(self, step: int, metrics: Mapping[str, float], *, validated: bool) -> None:
        """Add the metrics of a step. Raises RunError for a missing one that the order needs."""
        if step not in self._read:  # it only validates
            return
        for name in self._order.sampler.metrics - metrics.keys():
            if validated or not name.startswith("val/"):
                raise RunError(without_metric("until_metric in data.order", step, name, metrics))
        self._order.learn(step, metrics=metrics)
        self._known = step
        self._metrics.set()

    # -- the end of a step

    def metrics(self, step: int) -> dict[str, float]:
        """Epochs after a step, and the share of each source of its prompts."""
        if step not in self._read:
            return {}
        metrics = {"epoch": self._order.passed(step) / self._order.rows}
        if self._several:
            read = self._read[step]
            epochs = self._order.epochs(step)
            metrics |= {f"epoch/{name}": value for name, value in epochs.items()}
            metrics |= {
                f"data/{name}/prompts": read[source] / read.total() for source, name in enumerate(self._sources)
            }
        return metrics

    def after(self, step: int) -> dict[str, object]:
        return self._order.after(step)

    def commit(self, step: int) -> None:
        self.partial_rollouts.commit(step)
        self._order.commit(step)
        self._read.pop(step, None)


def _known(number: float) -> float | None:
    return None if math.isnan(number) else number


def _place(run: Run) -> str:
    return f"{run.task} (step {run.step})"


@contextmanager
def _failing(place: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise RunError(str(error), node=place) from error
