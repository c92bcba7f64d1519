"""Exchange between the parts of a pipeline: batches of experience, the policy's weights, and waits for both.

The driver calls it before each step and after each commit. `dagrl.orchestrator.folder.experience` has the files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dagrl.config.errors import listed
from dagrl.config.schema import ModelSpec
from dagrl.data.experience import origin_of
from dagrl.model_files.fingerprint import model_fingerprint, tokenizer_fingerprint
from dagrl.orchestrator.folder.experience import ExperienceFolder, PublishedWeights, Used
from dagrl.orchestrator.folder.run_folder import RunFolder
from dagrl.orchestrator.groups.task_group import run_in_daemon_thread
from dagrl.orchestrator.groups.worker_group import WorkerGroups
from dagrl.scheduler.plan import PlannedTask, Rows
from dagrl.validation.part import Part, policies_sent, starts_from_model
from dagrl.validation.prepare import PreparedPipeline
from dagrl.workers.errors import RefusedFolderError, RunError, WorkerLostError
from dagrl.workers.worker import Worker

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_QUIET_S = 10.0
"""Waits that last longer are reported."""


class Exchange:
    """The interface between the driver and its part. This base class serves whole pipelines, which exchange nothing."""

    is_part = False

    def __init__(self, prepared: PreparedPipeline, folder: RunFolder, experience: Path) -> None:
        self.pipeline, self.run = prepared.loaded.pipeline, folder
        self.files = ExperienceFolder(experience)
        self.note: Callable[[str], None] = lambda text: None
        self.stop_requested = False

    def check(self) -> None:
        """Check the folder before anything starts, and tell the other parts. Raises RefusedFolderError."""

    def prepare(self, prepared: PreparedPipeline) -> PreparedPipeline:
        """The pipeline to run. May wait for the other part. Raises RunError."""
        return prepared

    async def start(self, groups: WorkerGroups) -> None:
        """Begin, with all workers started."""

    async def begin(self, step: int) -> bool:
        """Wait until a step may begin; returns False if it never will. Raises RunError after a long wait."""
        return True

    def file(self, step: int) -> tuple[Path, str]:
        """The file that a step reads or writes, and the name of the explorer that writes it."""
        raise NotImplementedError

    def weights_to_write(self, step: int, task: PlannedTask) -> str | None:
        """The folder for the weights that `task` trains in `step`."""
        return None

    async def load_weights(self, executor: str, groups: WorkerGroups) -> None:
        """Give a generator the newest weights before a rollout."""

    def forget(self, executor: str) -> None:
        """A generator has been built again, and has its start weights."""

    def policy_version(self, step: int) -> int:
        return step

    def used(self, step: int) -> Used:
        """The batches that were used up to a step."""
        return {}

    async def commit(self, step: int) -> None:
        """A step is committed, and its checkpoint, if it has one, is written. Raises OSError."""

    def close(self, *, finished: bool) -> None:
        """Tell the other parts that this one has ended. `finished`: it will not continue."""

    async def _poll[Result](self, look: Callable[[], Result | None], waits_for: Callable[[], str]) -> Result | None:
        """The first result of `look`; None after a request to stop. Raises RunError after ``run.node_timeout_s``."""
        began, pause, noted = time.monotonic(), _FIRST_PAUSE_S, False
        limit_s = self.pipeline.run.node_timeout_s
        while (result := await run_in_daemon_thread(look)) is None:
            waited = time.monotonic() - began
            if self.stop_requested:
                return None
            if waited > limit_s:
                raise RunError(
                    f"waited {limit_s:g} s for {waits_for()}", hint="raise run.node_timeout_s to wait longer"
                )
            if waited > _QUIET_S and not noted:
                noted = True
                self.note(f"waiting for {waits_for()}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return result


class Explorer(Exchange):
    """Writes experience, and loads the weights that the trainer publishes."""

    is_part = True

    def __init__(self, prepared: PreparedPipeline, part: Part, folder: RunFolder, experience: Path) -> None:
        super().__init__(prepared, folder, experience)
        self.part = part
        self.name = str(part.share)
        self._held: dict[str, PublishedWeights | None] = {}
        """Executor -> its weights; None for its start weights."""
        self._open: set[int] = set()
        """Steps that have begun, and whose batches were not published."""

    def check(self) -> None:
        newest = max(self.files.batches().get(self.name, {}), default=0)
        if newest > self.run.start.step:
            raise RefusedFolderError(
                f"{self.files.path} has batch {newest} of explorer {self.name}, and {self.run.path} is at step "
                f"{self.run.start.step}",
                hint="go on in the run folder that wrote it, or name another folder with --experience",
            )
        writer, ended = self.files.explorers().get(self.name, ("", True))
        if not ended and writer != str(self.run.path.resolve()) and not self.run.start.step:
            raise RefusedFolderError(
                f"explorer {self.name} in {self.files.path} is the run {writer}",
                hint="give this one another number, such as --explorer 2/2, or name another folder with --experience",
            )
        # The explorer may have been killed between its checkpoint and the publication.
        self.files.publish(self.name, self.run.start.step)
        self.files.note_explorer(self.name, self.run.path, ended=False)

    def prepare(self, prepared: PreparedPipeline) -> PreparedPipeline:
        waiting = [name for name in self.part.sources.values() if not starts_from_model(self.pipeline, name)]
        if not waiting:
            return prepared
        what = f"the start weights of {listed(waiting)}, which the trainer writes to {self.files.path}"
        start = asyncio.run(self._poll(lambda: self.files.weights(0), lambda: what))
        assert start is not None, "no stop can be requested before the run"
        tokenizer = self.pipeline.model.tokenizer or self.pipeline.model.path
        engines = {
            name: self.pipeline.engines[name].model_copy(
                update={"model": ModelSpec(path=start.folder / source, tokenizer=tokenizer)}
            )
            for name, source in self.part.sources.items()
            if source in waiting
        }
        pipeline = self.pipeline.model_copy(update={"engines": {**self.pipeline.engines, **engines}})
        return replace(prepared, loaded=replace(prepared.loaded, pipeline=pipeline))

    async def begin(self, step: int) -> bool:
        most = self.part.most_ahead(self.pipeline)
        ahead = 0

        def look() -> bool | None:
            nonlocal ahead
            if self.files.trainer()[1]:
                return False
            ahead = self._ahead()
            return True if ahead <= most else None

        def waits_for() -> str:
            several = f" and {self.part.share.of} explorers" if self.part.share.of > 1 else ""
            return (
                f"the trainer to publish weights in {self.files.path}: {ahead} of the batches are not in them, and "
                f"schedule.max_staleness {self.pipeline.schedule.max_staleness}{several} allow {most}"
            )

        if not await self._poll(look, waits_for):
            if not self.stop_requested:
                self.note("the trainer has ended; no more experience is wanted")
            return False
        self._open.add(step)
        return True

    def _ahead(self) -> int:
        newest = self.files.weights()
        used = newest.used if newest else {}
        there = self.files.batches()
        waiting = sum(number > used.get(name, 0) for name, numbers in there.items() for number in numbers)
        return waiting + len(self._open)

    def file(self, step: int) -> tuple[Path, str]:
        return self.files.unpublished(self.name, step), self.name

    async def load_weights(self, executor: str, groups: WorkerGroups) -> None:
        source = self.part.sources.get(executor)
        newest = self.files.weights() if source else None
        if source is None or newest is None or newest == self._held.get(executor):
            return
        if newest.version == 0 and executor not in self._held:
            return
        what = f"{executor} to load {newest.folder}"
        try:
            await groups[executor].call_all(what, Worker.load_published, str(newest.folder / source), newest.version)
        except RunError as error:
            if isinstance(error, WorkerLostError) or self.files.weights(newest.version) == newest:
                raise
            # The trainer removed them while they were read, because newer ones exist.
            await self.load_weights(executor, groups)
            return
        self._held[executor] = newest

    def forget(self, executor: str) -> None:
        self._held.pop(executor, None)

    def policy_version(self, step: int) -> int:
        return max((held.version for held in self._held.values() if held), default=0)

    async def commit(self, step: int) -> None:
        self.files.publish(self.name, step)
        self._open.discard(step)

    def close(self, *, finished: bool) -> None:
        self.files.note_explorer(self.name, self.run.path, ended=finished)


class Trainer(Exchange):
    """Trains on experience, and publishes the weights."""

    is_part = True

    def __init__(self, prepared: PreparedPipeline, part: Part, folder: RunFolder, experience: Path) -> None:
        super().__init__(prepared, folder, experience)
        self.part = part
        self._plan = prepared.plan
        self._interval = self.pipeline.schedule.weights_every
        self._files: dict[int, Path] = {}
        self._used: dict[int, Used] = {folder.start.step: dict(folder.start.experience)}
        """Step -> the batches that were used up to it."""

    def check(self) -> None:
        run, _ = self.files.trainer()
        own = str(self.run.path.resolve())
        if run not in ("", own) and self._interval:
            raise RefusedFolderError(
                f"{run} is trained on the experience in {self.files.path}, and explorers take its weights",
                hint="name another folder with --experience, or set schedule.weights_every=0 to be trained on the "
                "same experience without explorers",
            )
        if not self._interval and not self.files.batches():
            raise RefusedFolderError(
                f"{self.files.path} holds no experience, and with schedule.weights_every 0 no explorer writes any",
                hint="name the folder with --experience",
            )
        for path in self._next(self._used[self.run.start.step]):
            if why := self._why_unusable(path):
                raise RefusedFolderError.of(why)
        if self._interval:
            self.files.note_trainer(self.run.path, ended=False)
            self.files.remove_unpublished_weights()

    async def start(self, groups: WorkerGroups) -> None:
        step = self.run.start.step
        needed = step or not all(starts_from_model(self.pipeline, name) for name in self._policies())
        # Explorers need the first weights even if they begin later.
        if not self._interval:
            return
        if needed and not self.files.weights(step):
            folder = self.files.unpublished_weights(step)
            for name in self._policies():
                what = f"{name} to write its weights to {folder}"
                await groups[name].call_all(what, Worker.publish_weights, str(folder / name))
            self.files.publish_weights(step, self._used[step])
        # Only now, because explorers would otherwise return to the start weights for a while.
        self.files.remove_weights_after(step)

    def _policies(self) -> list[str]:
        there = self._plan.executors
        return [name for name in policies_sent(self.pipeline) if name in there and there[name].trained]

    async def begin(self, step: int) -> bool:
        before = self._used[step - 1]

        def look() -> Path | bool | None:
            # The oldest one, so that no batch waits for a slower explorer or becomes too old.
            if batches := self._next(before):
                return min(batches, key=lambda path: (path.stat().st_mtime_ns, _turn_of(path)))
            return False if self._is_over(before) else None

        def waits_for() -> str:
            explorers = self.files.explorers()
            running = listed(name for name, (_, ended) in explorers.items() if not ended)
            who = f"from explorer {running}" if running else "and no explorer is running"
            return f"a batch of experience in {self.files.path} {who}"

        batch = await self._poll(look, waits_for)
        if not isinstance(batch, Path):
            if not self.stop_requested:
                self.note("all batches of experience are used, and their explorers have ended")
            return False
        if why := await run_in_daemon_thread(self._why_unusable, batch):
            raise RunError.of(why)
        number, explorer = _turn_of(batch)
        self._files[step], self._used[step] = batch, {**before, explorer: number}
        return True

    def _next(self, used: Used) -> list[Path]:
        """The next batch of each explorer. Never a later one: a shared file system may list names late."""
        paths = [self.files.batch(name, used.get(name, 0) + 1) for name in self.files.batches()]
        return [path for path in paths if path.exists()]

    def _is_over(self, used: Used) -> bool:
        there = self.files.batches()
        left = any(max(numbers) > used.get(name, 0) for name, numbers in there.items())
        explorers = self.files.explorers()
        return not left and bool(there or explorers) and all(ended for _, ended in explorers.values())

    def _why_unusable(self, path: Path) -> str | None:
        """The reason why a batch does not belong to this part, as a sentence."""
        try:
            origin, columns = origin_of(path)
        except ValueError as error:
            return str(error)
        model, size = self.pipeline.model, self._plan.group_size(Rows.TRAIN)
        if origin.model != model_fingerprint(model):
            return f"{path} is experience of another model than the pipeline's; name another folder with --experience"
        if origin.tokenizer != tokenizer_fingerprint(model):
            return f"{path} was written with another tokenizer than the pipeline's; put that back"
        if origin.group_size != size:
            return f"{path} has {origin.group_size} samples of each prompt, and the pipeline says {size}; set that `n`"
        for column, readers in self.part.cut.columns.items():
            if column not in columns:
                why = "it was written with another --only, or by another pipeline"
                return f"{path} has no column `{column}`, which {listed(readers)} read; {why}"
        return None

    def file(self, step: int) -> tuple[Path, str]:
        return self._files.pop(step), ""

    def weights_to_write(self, step: int, task: PlannedTask) -> str | None:
        if not self._publishes(step) or task.executor not in self._policies():
            return None
        # Several tasks may train an engine; the last one has its weights.
        last = [other.name for other in self._plan.tasks if other.trains and other.executor == task.executor][-1]
        return str(self.files.unpublished_weights(step) / task.executor) if task.name == last else None

    def _publishes(self, step: int) -> bool:
        return self._interval > 0 and step % self._interval == 0 and bool(self._policies())

    def used(self, step: int) -> Used:
        return self._used[step]

    async def commit(self, step: int) -> None:
        if self._publishes(step):
            await run_in_daemon_thread(self.files.publish_weights, step, self._used[step])
        self._used.pop(step - 1, None)

    def close(self, *, finished: bool) -> None:
        if self._interval:
            self.files.note_trainer(self.run.path, ended=finished)


def _turn_of(batch: Path) -> tuple[int, str]:
    explorer, _, number = batch.stem.rpartition("-")
    return int(number), explorer


def open_exchange(prepared: PreparedPipeline, folder: RunFolder, experience: Path) -> Exchange:
    """The exchange of a part or of a whole pipeline."""
    part = prepared.part
    if part is None:
        return Exchange(prepared, folder, experience)
    return (Explorer if part.explores else Trainer)(prepared, part, folder, experience)
