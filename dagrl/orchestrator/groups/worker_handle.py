"""Typed calls of one worker's methods. Every wait has a timeout, and every failure becomes a `RunError`.

pending = handle.submit("actor to sleep", Worker.sleep, Residency.ASLEEP)    # PendingCall[Slept]
slept = await pending.result()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate

import ray

from dagrl.backends.base import EngineLostError
from dagrl.ops.work import EngineWork, RolloutWork, TaskWork
from dagrl.plugins.calls import recorded_call
from dagrl.scheduler.plan import WorkerId
from dagrl.weight_sync.channel import PeerError
from dagrl.workers.errors import RunError, WorkerDiedError, WorkerHungError, WorkerLostError
from dagrl.workers.messages import Block, Heartbeat, StreamMessage, WorkerInfo
from dagrl.workers.object_cache import CacheView, ObjectTimeoutError
from dagrl.workers.serialization import Serialized, deserialize, message_bytes, serialize
from dagrl.workers.worker import Worker

type ByteCounter = Callable[[int], None]
"""Called with the size of each message to or from a worker."""

_WITHOUT_ROOM = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)
NOT_STARTED = WorkerInfo("", "", 0, 0, ())


@dataclass(frozen=True, slots=True)
class Timeout:
    """How long to wait for an answer."""

    seconds: float
    key: str
    """The key of ``run`` that sets it."""


@dataclass(frozen=True, slots=True)
class PendingCall[Result]:
    """A call that was sent to a worker."""

    worker: WorkerHandle
    waits_for: str
    ref: ray.ObjectRef
    """Ref of the result, which other workers may read too."""

    async def result(self, timeout: Timeout | None = None) -> Result:
        return await self.worker.wait_for(self.ref, self.waits_for, timeout=timeout)


@dataclass(frozen=True, slots=True)
class PendingTask:
    """A task that was sent to a worker."""

    worker: WorkerHandle
    node: str
    message: ray.ObjectRef
    """Ref of the message with the blocks."""
    columns: ray.ObjectRef
    """Ref of the object that will hold the columns, if there are any."""

    async def result(self, count_bytes: ByteCounter) -> list[Block]:
        data = await self.worker.wait_for(self.message, f"the result of {self.node}", node=self.node)
        # Now the worker starts the next call in its queue.
        self.worker.last_heard = asyncio.get_running_loop().time()
        return _deserialize((data, [self.columns]), count_bytes)


class WorkerHandle:
    """The driver's handle of one worker of an executor."""

    def __init__(
        self,
        worker: WorkerId,
        actor: ray.actor.ActorHandle,
        timeout: Timeout,
        info: WorkerInfo = NOT_STARTED,
        cache: CacheView | None = None,
        run_dir: Path | None = None,
    ) -> None:
        """`timeout` of calls. `cache` is None if the worker caches nothing, or processes calls concurrently.

        `run_dir`: the run folder, where the worker records calls of user functions.
        """
        self.id = worker
        self.actor, self.timeout, self.info, self.cache, self._run_dir = actor, timeout, info, cache, run_dir
        self.last_heard = float("-inf")
        """Time, by the loop's clock, of the last heartbeat or the last end of a task."""

    @property
    def location(self) -> str:
        return f"{self.id} (host {self.info.host}, pid {self.info.pid})"

    # -- calls

    def submit[**P, Result](
        self, waits_for: str, method: Callable[Concatenate[Worker, P], Result], /, *args: P.args, **kwargs: P.kwargs
    ) -> PendingCall[Result]:
        """Queue a call of a method of the worker. `waits_for` describes the call in messages."""
        return self.submit_serialized(waits_for, serialize((method, args, kwargs)))

    async def call[**P, Result](
        self, waits_for: str, method: Callable[Concatenate[Worker, P], Result], /, *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        return await self.submit(waits_for, method, *args, **kwargs).result()

    def submit_serialized(self, waits_for: str, message: Serialized) -> PendingCall[Any]:
        """`submit` with a serialized method and arguments, which several workers may share."""
        with self._run_errors(waits_for):
            return PendingCall(self, waits_for, self.actor.call.remote(*message))

    # -- tasks

    def submit_task(self, work: TaskWork, count_bytes: ByteCounter) -> PendingTask:
        """Queue a task that does not stream. One message each way."""
        if self.cache and isinstance(work, EngineWork):
            work = self.cache.use_keys(work)
        node = _describe(work)
        with self._run_errors(node):
            message, columns = self.actor.run_task.remote(*_serialize(work, count_bytes))
        if self.cache and isinstance(work, EngineWork):
            self.cache.add_output(columns, work)
        return PendingTask(self, node, message, columns)

    async def stream(self, work: RolloutWork, count_bytes: ByteCounter) -> AsyncIterator[Block | Heartbeat]:
        """Run a chunk of a rollout. The driver owns the columns: they outlive the worker."""
        node = _describe(work)

        async def read(ref: ray.ObjectRef) -> bytes:
            return await self._wait_for(ref, f"a heartbeat of {node}", node, self.timeout)

        with self._run_errors(node):
            stream = self.actor.stream_task.remote(*_serialize(work, count_bytes))
            while (pair := await next_pair(stream, read)) is not None:
                self.last_heard = asyncio.get_running_loop().time()
                columns, data = pair
                message: StreamMessage = _deserialize((data, [columns]), count_bytes)
                for item in message.items:
                    yield item
                if message.last:
                    # Not until the end of the stream, which would be one more message for the step to wait for.
                    return

    # -- waits

    async def wait_for(
        self, ref: ray.ObjectRef, waits_for: str, *, node: str = "", timeout: Timeout | None = None
    ) -> Any:
        with self._run_errors(node or waits_for):
            return await self._wait_for(ref, waits_for, node or waits_for, timeout or self.timeout)

    async def _wait_for(self, ref: ray.ObjectRef, waits_for: str, node: str, timeout: Timeout) -> Any:
        """The timeout restarts with each sign of life of the worker: a call may be queued behind a long task."""
        clock = asyncio.get_running_loop().time
        begin = clock()
        deadline = begin + timeout.seconds
        while True:
            # Not `asyncio.wait_for`, which creates a task: this runs for every message.
            patience = asyncio.timeout_at(deadline)
            try:
                async with patience:
                    return await ref
            except TimeoutError:
                if not patience.expired():
                    raise
            deadline = max(begin, self.last_heard) + timeout.seconds
            if deadline <= clock():
                raise self._timeout_error(timeout, waits_for, node)

    def _timeout_error(self, timeout: Timeout, waits_for: str, node: str) -> RunError:
        cause = f"waited {timeout.seconds:g} s for {waits_for}, from {self.location}{self._called('which calls')}"
        hint = f"raise run.{timeout.key} if it needs longer"
        if timeout.key == "start_timeout_s":
            # A restart would take as long.
            return RunError(cause, node=node, worker=self.location, hint=hint)
        return WorkerHungError(cause, node=node, worker=self.location, hint=hint, lost=(self.id,))

    def _called(self, verb: str) -> str:
        """Name the user function that the worker runs, or died in, for a message; empty if unknown."""
        what = recorded_call(self._run_dir, self.info.host, self.info.pid) if self._run_dir else ""
        return f", {verb} {what}" if what else ""

    @contextmanager
    def _run_errors(self, node: str) -> Iterator[None]:
        """Translate Ray's errors within the context."""
        try:
            yield
        except ray.exceptions.RayError as error:
            raise self._translate(error, node) from error

    def _translate(self, error: Exception, node: str) -> RunError:
        about: dict[str, Any] = {"node": node, "worker": self.location, "details": str(error)}
        if isinstance(getattr(error, "cause", error), _WITHOUT_ROOM):
            hint = "make room on the disk of Ray's temporary folder (TMPDIR), or lower data.prompts_per_step"
            return WorkerLostError("Ray's object store is full, and has no room on the disk", hint=hint, **about)
        if isinstance(error, ray.exceptions.RayTaskError):
            cause = error.cause if error.cause is not None else error
            name = "" if isinstance(cause, ValueError | OSError) else f"{type(cause).__name__}: "
            text = f"{name}{cause}".strip()
            if isinstance(cause, EngineLostError):
                return WorkerLostError(text, **about, lost=(self.id,), alive=(self.id,))
            if isinstance(cause, PeerError | ObjectTimeoutError | ray.exceptions.RayError):
                # Another worker failed, and has its own error. Ray's text has several paragraphs.
                return WorkerLostError(_first_sentence(text), **about)
            return RunError(text, **about)
        if isinstance(error, ray.exceptions.RayActorError):
            hint = "was it killed, or out of memory (see `dmesg`)? `dagrl run` goes on from the last checkpoint"
            if called := self._called("in a call of"):
                hint = f"does the function end its process, or take too much memory? If not, {hint}"
            return WorkerDiedError(f"the worker's process died{called}", hint=hint, **about, lost=(self.id,))
        return WorkerLostError(f"{type(error).__name__}: {_first_sentence(str(error))}", **about)


async def next_pair(
    stream: ray.ObjectRefGenerator, read: Callable[[ray.ObjectRef], Awaitable[bytes]]
) -> tuple[ray.ObjectRef, bytes] | None:
    """The next two objects of a Ray stream: the first as a ref, the second as `read` returns it. None at the end.

    The second object arrives after the first, so one wait covers both. Ray's own iterator waits for each of them.
    """
    first, second = stream._get_next_ref_n(2)
    try:
        message = await read(second)
    except ray.exceptions.ObjectRefStreamEndOfStreamError:
        try:
            # If the method fails, its exception takes the place of a pair.
            await read(first)
        except ray.exceptions.ObjectRefStreamEndOfStreamError:
            return None
        raise
    stream._consume_next_ref_n(2)
    return first, message


def _describe(work: TaskWork) -> str:
    return f"{work.task} (step {work.step})"


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].partition("\n")[0]


def _serialize(work: TaskWork, count_bytes: ByteCounter) -> Serialized:
    message = serialize(work)
    count_bytes(message_bytes(*message))
    return message


def _deserialize(message: Serialized, count_bytes: ByteCounter) -> Any:
    count_bytes(message_bytes(*message))
    return deserialize(*message)
