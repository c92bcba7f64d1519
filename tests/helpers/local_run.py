"""Runs of the real driver with workers in this process: no Ray, no engines. Chance decides which work ends next."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from dagrl.backends.base import RequestLimits
from dagrl.data.batch import Batch, Column
from dagrl.ops.base import Output, Resources
from dagrl.ops.work import AdvantageWork, BufferWork, PartialRollout, RolloutId, RolloutWork, TaskWork
from dagrl.orchestrator.driver import Driver
from dagrl.orchestrator.exchange import Exchange
from dagrl.orchestrator.folder.checkpoint import Checkpoints
from dagrl.orchestrator.folder.run_folder import RunFolder
from dagrl.orchestrator.groups.worker_failures import RestartPolicy
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.scheduler.commands import Commit, Run
from dagrl.scheduler.plan import HOST, Executor, PlannedTask, Rows, WorkerId
from dagrl.tracking import Trackers
from dagrl.validation.prepare import PreparedPipeline
from dagrl.workers.messages import Block, Heartbeat, SendResult, block_of
from dagrl.workers.object_cache import ObjectCache
from dagrl.workers.worker import Worker

LENGTH = 4
"""Tokens of each response."""
ANSWERS: dict[Callable[..., Any], Any] = {
    Worker.request_limits: RequestLimits(512, 512),
    Worker.send_weights: SendResult(0.0, 0),
    Worker.receive_weights: 0.0,
}


class KilledError(Exception):
    """The process is gone."""


class Ref:
    """Names an object, as Ray's refs do."""

    def __init__(self, batch: Batch | None = None) -> None:
        self.batch = batch

    def binary(self) -> bytes:
        return str(id(self)).encode()


def get_objects(refs: Sequence[Ref], timeout_s: float, what: str) -> list[Batch | None]:
    return [ref.batch for ref in refs]


async def at_once(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.workers.object_cache.get_objects", get_objects)
    # A thread would survive the kill, and write a checkpoint into the resumed run.
    monkeypatch.setattr("dagrl.orchestrator.checkpoint_writer.run_in_daemon_thread", at_once)
    monkeypatch.setattr("os.fsync", lambda file: None)


def number_of(*key: object) -> float:
    """A number in [0, 1) that `key` determines."""
    return zlib.crc32(repr(key).encode()) / 2**32


class _Trackers(Trackers):
    """Keeps metrics alone."""

    def __init__(self, folder: Path, logged: dict[int, dict[str, float]]) -> None:
        timeline: Any = []
        super().__init__((), timeline, None, folder, 0)
        self._logged = logged

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._logged[step] = dict(metrics)

    def note(self, message: str) -> None:
        pass


class LocalRun(Driver):
    """One process of a run, from the newest checkpoint in `folder` to its last step, a kill or Ctrl-C."""

    def __init__(
        self, prepared: PreparedPipeline, folder: Path, chance: Random, ends_at: int | None, *, killed: bool = True
    ) -> None:
        """`ends_at`: the piece of work, of any worker, at which it is killed, or else asked to stop; None: never."""
        pipeline = prepared.loaded.pipeline
        checkpoints = Checkpoints(folder, pipeline.run.keep)
        checkpoints.remove_torn()
        found = checkpoints.find()
        run_folder = RunFolder(folder, checkpoints, found.state, found.folder)
        self.first_step = run_folder.start.step + 1
        self.chance, self.ends_at, self.killed, self.pieces = chance, ends_at, killed, 0
        self.reads: dict[tuple[int, int], tuple[int, list[int]]] = {}
        """Step and round -> the number of its carried prompts, and all its prompts."""
        self.unfinished: dict[int, list[int]] = {}
        """Step -> the prompts that its rollouts left."""
        self.returned: dict[int, dict[str, list[Any]]] = {}
        """Step -> the columns that a buffer returned to it."""
        self.given: dict[int, tuple[object, ...]] = {}
        """Step -> the KL weight and the baselines that it began with."""
        self.batches: dict[int, list[int]] = {}
        """Step -> the prompts that it trained on."""
        self.logged: dict[int, dict[str, float]] = {}
        groups: Any = _Groups(prepared, folder, self)
        trackers, exchange = _Trackers(folder, self.logged), Exchange(prepared, run_folder, folder)
        super().__init__(prepared, groups, run_folder, trackers, RestartPolicy(0), exchange)

    def to_the_end(self) -> bool:
        """Returns whether the run has had its last step."""
        try:
            asyncio.run(asyncio.wait_for(self.train(), 60))
        except KilledError:
            return False
        return self.scheduler.committed == self.plan.steps

    def batch(self, step: int) -> BatchIndex:
        return self._steps.batch(step, Rows.TRAIN)

    async def pause(self) -> None:
        """Let other work go first, or end the run."""
        if self.pieces == self.ends_at:
            if self.killed:
                raise KilledError
            self.request_stop()
        self.pieces += 1
        for _ in range(self.chance.choice([0, 1, 2, 8])):
            await asyncio.sleep(0)

    async def _read_prompts(self, run: Run, task: PlannedTask, executor: Executor, batch: BatchIndex) -> None:
        await super()._read_prompts(run, task, executor, batch)
        carried = self._carried.partial_rollouts.taken(run.step, run.round)
        self.reads[run.step, run.round] = len(carried), list(map(batch.prompt, batch.groups_in(batch.all_rows)))

    async def _rollout(self, run: Run, task: PlannedTask, executor: Executor, batch: BatchIndex) -> None:
        await super()._rollout(run, task, executor, batch)
        left = [each.carried.prompt for each in self._carried.partial_rollouts._prompts if each.left_by == run.step]
        self.unfinished[run.step] = left

    async def _commit(self, commit: Commit) -> None:
        batch = self.batch(commit.step)
        groups = batch.groups_in(batch.all_rows)
        self.batches[commit.step] = [batch.prompt(group) for group in groups if not batch.is_returned(group)]
        await super()._commit(commit)


class _Call:
    """A call of a worker, whose result comes later."""

    def __init__(self, handle: _Handle, result: Any, columns: Ref | None = None) -> None:
        self.worker, self.columns, self.ref = handle, columns, Ref()
        self._task = asyncio.ensure_future(result)

    async def result(self, *_: object) -> Any:
        return await self._task


class _Handle:
    """A worker that does one thing after the other. A CPU worker is the real one."""

    def __init__(self, executor: Executor, rank: int, prepared: PreparedPipeline, folder: Path, run: LocalRun) -> None:
        self.id, self._run, self._turn = WorkerId(executor.name, rank), run, asyncio.Lock()
        self._aborted: set[RolloutId] = set()
        self._worker = Worker()
        loaded = prepared.loaded
        self._worker._resources = Resources(loaded.pipeline, loaded.folder, folder)
        self._worker._cache = ObjectCache(1.0, keep=False)
        self._size = prepared.plan.samples_per_prompt

    def submit_task(self, work: TaskWork, count_bytes: Callable[[int], None]) -> _Call:
        return _Call(self, self._work(work, columns := Ref()), columns)

    async def call(self, what: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        await self._run.pause()
        if method is Worker.abort:
            self._aborted.add(args[0])
        return ANSWERS.get(method)

    async def _work(self, work: TaskWork, columns: Ref) -> list[Block]:
        async with self._turn:
            await self._run.pause()
            on_host = self.id.executor == HOST
            blocks = list(self._worker.run(work)) if on_host else [block_of(work, self._computed(work), 0, None)]
            if isinstance(work, BufferWork):
                self._run.returned[work.step] = {
                    name: [column[row].tolist() for row in range(len(column))]
                    for name, column in blocks[1].ref.columns.items()
                }
            if isinstance(work, AdvantageWork):
                self._run.given[work.step] = work.kl_weight, dict(work.baselines)
            if batches := [block.ref for block in blocks if block.ref is not None]:
                columns.batch = Batch.concat(batches)
            return [block if block.ref is None else replace(block, ref=columns) for block in blocks]

    def _computed(self, work: TaskWork) -> Output:
        """An engine's output: log-probs that the responses determine."""
        if work.op != "logprob":
            return Output((), work.rows)
        batch = Batch.concat([part.batch for part in self._worker._cache.parts(work.step, work.parts)])
        values = [-1 - number_of(work.task, batch["response_tokens"][row].tolist()) for row in range(len(batch))]
        return Output((), batch.rows, {"logprob": Column.ragged([[value] * LENGTH for value in values], "float32")})

    async def stream(self, work: RolloutWork, count_bytes: Callable[[int], None]) -> AsyncIterator[Block | Heartbeat]:
        """The order in which groups end does not depend on time; how many end before an abort does."""
        await self._run.pause()
        yield Heartbeat(0)
        batch = self._run.batch(work.step)
        left = sorted(batch.groups_in(work.rows), key=lambda group: number_of(work.step, group, batch.prompt(group)))
        while left and work.rollout not in self._aborted:
            yield self._block(work, batch, [left.pop(0)], unfinished=False)
            await self._run.pause()
        if left:
            yield self._block(work, batch, left, unfinished=True)

    def _block(self, work: RolloutWork, batch: BatchIndex, groups: list[int], *, unfinished: bool) -> Block:
        rows, begun = batch.rows_of(groups), []
        for group in groups:
            partial = work.begun.get(group)
            if isinstance(partial, PartialRollout):
                column = partial.ref.batch.in_order(partial.rows)["response_tokens"]
                begun += column.lengths.tolist()
            else:
                begun += [0] * len(batch.rows_of([group]))
        began, tokens, lengths = np.array(begun, dtype=np.int64), list[list[int]](), []
        for row, there in zip(rows.tolist(), begun, strict=True):
            group = row // self._size
            key = (work.step, batch.prompt(group), row)
            lengths.append(min(LENGTH, there + round(number_of("more", *key))) if unfinished else LENGTH)
            tokens.append([int(10 * number_of(place, *key)) for place in range(lengths[-1])])
        columns = {
            "response_tokens": Column.ragged(tokens, "int64"),
            "rollout_logprob": Column.ragged([[-1.0] * len(each) for each in tokens], "float32"),
            "response_mask": Column.ragged([[1.0] * len(each) for each in tokens], "float32"),
            "token_version": Column.ragged([[work.step - 1] * len(each) for each in tokens], "int64"),
            "policy_version": Column(np.full(len(rows), work.step - 1)),
            "finish_reason": Column.text(["length"] * len(rows)),
        }
        counts = {"sampled": np.array(lengths) - began, "begun": began, "outdated": np.zeros(len(rows), dtype=np.int64)}
        output = Output((), rows, columns, counts=counts, unfinished=unfinished, uncounted=("token_version",))
        block = block_of(work, output, 0, None)
        return replace(block, ref=Ref(block.ref))


class _Group:
    def __init__(self, handles: list[_Handle]) -> None:
        self.handles, self.by_rank = handles, dict(enumerate(handles))

    def submit_all(self, what: str, method: Callable[..., Any], *args: Any) -> list[_Call]:
        return [_Call(handle, handle.call(what, method, *args)) for handle in self.handles]

    async def call_all(self, what: str, method: Callable[..., Any], *args: Any) -> list[Any]:
        return [await call.result() for call in self.submit_all(what, method, *args)]


class _Groups:
    def __init__(self, prepared: PreparedPipeline, folder: Path, run: LocalRun) -> None:
        self._groups = {
            name: _Group([_Handle(executor, rank, prepared, folder, run) for rank in range(executor.ranks)])
            for name, executor in prepared.plan.executors.items()
        }

    def __getitem__(self, name: str) -> _Group:
        return self._groups[name]

    def servers(self, executor: Executor) -> list[_Handle]:
        return self[executor.name].handles
