"""The checkpoints of a run under way: executor by executor into a folder aside, then all of it into its place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dagrl.orchestrator.folder.checkpoint import Checkpoints, RunState
from dagrl.orchestrator.steps.record import Activity
from dagrl.scheduler.commands import Save
from dagrl.scheduler.plan import HOST, Plan
from dagrl.workers.errors import RunError
from dagrl.workers.groups.daemon_thread import apart
from dagrl.workers.groups.worker_group import Fleet


class Saving:
    """Writes one checkpoint at a time; with `in_background`, while training goes on."""

    def __init__(
        self,
        fleet: Fleet,
        plan: Plan,
        checkpoints: Checkpoints,
        *,
        in_background: bool,
        timeout_s: float,
        draw: Callable[[int, Activity], None],
        report: Callable[[asyncio.Task[Any]], None],
    ) -> None:
        """`draw` puts what has been written behind a step into the timeline, `report` hears how that ended.

        `timeout_s` bounds waits for the disk.
        """
        self._fleet = fleet
        self._plan = plan
        self._checkpoints = checkpoints
        self._in_background, self._timeout_s = in_background, timeout_s
        self._draw, self._report = draw, report
        self._beginning = asyncio.Lock()
        self._asides: dict[int, Path] = {}
        """Step -> where its checkpoint is being written."""
        self._writing: asyncio.Task[None] | None = None

    async def save(self, save: Save) -> None:
        """Have one executor write its state, or copy it so far that it may go on."""
        async with self._beginning:
            if save.step not in self._asides:
                await self.last()
                self._asides[save.step] = self._checkpoints.begin(save.step)
        folder, what = self._asides[save.step] / save.executor, f"{save.executor} to save step {save.step}"
        await self._fleet.call_all(save.executor, "save", folder, self._in_background, waits_for=what)

    async def finish(self, state: RunState) -> None:
        """Make what all executors have saved the newest checkpoint: at once, or when it is written."""
        aside = self._asides.pop(state.step)
        if self._in_background:
            self._writing = asyncio.get_running_loop().create_task(self._finish_written(aside, state))
            self._writing.add_done_callback(self._report)
        else:
            await self._put_into_place(aside, state)

    async def last(self) -> None:
        """Wait until no checkpoint is being written; raises what went wrong with it."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    def cancel(self) -> None:
        """Wait for nothing any more."""
        if self._writing is not None:
            self._writing.cancel()

    async def _finish_written(self, aside: Path, state: RunState) -> None:
        for executor in self._plan.executors.values():
            if executor.trained:
                start = time.time()
                what = f"{executor.name} to write the checkpoint of step {state.step}"
                await self._fleet.call_until_true(executor.name, "finish_save", waits_for=what)
                group, worker = executor.group or HOST, f"{executor.name}/0"
                self._draw(state.step, Activity("write", "save", start, time.time(), None, group, worker))
        await self._put_into_place(aside, state)

    async def _put_into_place(self, aside: Path, state: RunState) -> None:
        """In a thread: to look through the files and to remove old ones takes time, which the main loop has not."""
        placing = asyncio.ensure_future(apart(self._checkpoints.finish, aside, state))
        done, _ = await asyncio.wait([placing], timeout=self._timeout_s)
        if not done:
            raise RunError(
                f"waited {self._timeout_s:g} s for the checkpoint of step {state.step} to be put into its place",
                hint=f"does the disk under {aside.parent} still answer? Or raise run.node_timeout_s",
            )
        await placing
