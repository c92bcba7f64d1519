"""Writes checkpoints during a run: each executor into a temporary folder, which is then renamed into place.

Each gets a score from the metric of ``run.keep_best``.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from dagrl.config.schema import KeepBestSpec
from dagrl.orchestrator.folder.checkpoint import Checkpoints, RunState, Score
from dagrl.orchestrator.groups.task_group import run_in_daemon_thread
from dagrl.orchestrator.groups.worker_group import WorkerGroups
from dagrl.orchestrator.steps.record import StepRecord, without_metric
from dagrl.scheduler.commands import Save
from dagrl.scheduler.intervals import Activity
from dagrl.scheduler.plan import HOST, Plan, WorkerId
from dagrl.workers.errors import RunError
from dagrl.workers.worker import Worker


class CheckpointWriter:
    """Writes one checkpoint at a time; with `in_background`, while training continues."""

    def __init__(
        self,
        groups: WorkerGroups,
        plan: Plan,
        checkpoints: Checkpoints,
        *,
        in_background: bool,
        timeout_s: float,
        draw: Callable[[Iterable[Activity]], None],
        report: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """`draw` adds background writes to the timeline. `report` is called when one ends. `timeout_s` bounds waits
        for the disk.
        """
        self._groups, self._checkpoints = groups, checkpoints
        self._trained = [executor for executor in plan.executors.values() if executor.trained]
        self._in_background, self._timeout_s = in_background, timeout_s
        self._draw, self._report = draw, report
        self._lock = asyncio.Lock()
        self._folders: dict[int, Path] = {}
        self._writing: asyncio.Task[None] | None = None

    async def save(self, save: Save) -> None:
        """Have one executor write its state, or copy it so that the executor may continue."""
        async with self._lock:
            if save.step not in self._folders:
                await self.join()
                self._folders[save.step] = self._checkpoints.begin(save.step)
        folder, what = self._folders[save.step] / save.executor, f"{save.executor} to save step {save.step}"
        await self._groups[save.executor].call_all(what, Worker.save, folder, self._in_background)

    async def finish(self, state: RunState) -> None:
        """Make the saved states of all executors the newest checkpoint: now, or once they are written."""
        # A pipeline without training saves only its place in the data.
        folder = self._folders.pop(state.step, None) or self._checkpoints.begin(state.step)
        # Without training, steps are committed concurrently, and no save has waited for the previous checkpoint.
        async with self._lock:
            if self._in_background:
                await self.join()
                self._writing = asyncio.get_running_loop().create_task(self._finish_written(folder, state))
                self._writing.add_done_callback(self._report)
            else:
                await self._move_into_place(folder, state)

    async def save_all(self, state: RunState) -> None:
        for executor in self._trained:
            await self.save(Save(state.step, executor.name))
        await self.finish(state)

    async def join(self) -> None:
        """Wait until no checkpoint is being written. Raises its failure."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    def cancel(self) -> None:
        if self._writing is not None:
            self._writing.cancel()

    async def _finish_written(self, folder: Path, state: RunState) -> None:
        for executor in self._trained:
            start = time.time()
            what = f"{executor.name} to write the checkpoint of step {state.step}"
            await self._groups[executor.name].call_until_true(what, Worker.finish_save)
            group, worker = executor.group or HOST, WorkerId(executor.name, 0)
            self._draw([Activity("write", "save", start, time.time(), state.step, None, group, worker)])
        await self._move_into_place(folder, state)

    async def _move_into_place(self, folder: Path, state: RunState) -> None:
        """In a thread: checksums and the removal of old checkpoints take time."""
        moving = asyncio.ensure_future(run_in_daemon_thread(self._checkpoints.finish, folder, state))
        done, _ = await asyncio.wait([moving], timeout=self._timeout_s)
        if not done:
            raise RunError(
                f"waited {self._timeout_s:g} s for the checkpoint of step {state.step} to be moved into place",
                hint=f"does the disk under {folder.parent} still answer? Or raise run.node_timeout_s",
            )
        await moving


class CheckpointScorer:
    """Scores the steps that are saved."""

    def __init__(self, best: KeepBestSpec | None, plan: Plan, note: Callable[[str], None]) -> None:
        """`note` is called once if there is no such metric."""
        self._best, self._plan, self._note = best, plan, note
        self._noted = False

    def score(self, record: StepRecord) -> Score | None:
        """The step's score. None if the metric was not measured, or is not finite."""
        if self._best is None:
            return None
        measured, metric = record.measured(), self._best.metric
        value = measured.get(metric)
        if value is not None and math.isfinite(value):
            return Score(metric, value)
        if value is None and not self._noted and (self._plan.validates(record.step) or not metric.startswith("val/")):
            self._noted = True
            self._note(without_metric("run.keep_best", record.step, metric, measured))
        return None
