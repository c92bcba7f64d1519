"""Classification of a worker's failure: a user's error ends the run, a lost worker may be restarted."""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import exceptions
from work import work_of

from dagrl.backends.base import EngineLostError
from dagrl.config.schema import Pipeline
from dagrl.ops.work import RolloutWork, ScoreWork
from dagrl.orchestrator.groups.worker_group import WorkerGroup, WorkerGroups
from dagrl.orchestrator.groups.worker_handle import Timeout, WorkerHandle
from dagrl.plugins.calls import FOLDER as CALLS
from dagrl.scheduler.plan import Plan, WorkerId
from dagrl.weight_sync.channel import PeerError
from dagrl.workers.errors import RunError, WorkerDiedError, WorkerHungError, WorkerLostError
from dagrl.workers.messages import Block, Heartbeat, StreamMessage, WorkerInfo
from dagrl.workers.object_cache import ObjectTimeoutError
from dagrl.workers.serialization import deserialize, serialize
from dagrl.workers.worker import Worker

HERE = WorkerInfo("node7", "10.0.0.7", 1, 4711, ())
FOREVER = Timeout(1800.0, "node_timeout_s")


class Method:
    """A method of an actor, as Ray has them."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self, *args: Any) -> Any:
        async def answer() -> Any:
            if isinstance(self._answer, Exception):
                raise self._answer
            await asyncio.sleep(self._answer)
            return "answered"

        return answer()


class Actor:
    """A worker whose methods all answer with the same failure, or after so many seconds."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __getattr__(self, name: str) -> Method:
        return Method(self._answer)


def failed_with(cause: Exception) -> exceptions.RayTaskError:
    """An exception in a worker, as Ray reports it."""
    return exceptions.RayTaskError("run", "a traceback", cause)


@pytest.fixture
def answer() -> Any:
    """The outcome of a call to a worker that answers like this, and its time."""

    def call(answer: Any, timeout_s: float = 1800, key: str = "node_timeout_s") -> RunError | str:
        timeout = Timeout(timeout_s, key)

        async def act() -> Any:
            handle = WorkerHandle(WorkerId("generator", 1), Actor(answer), Timeout(timeout_s, "node_timeout_s"), HERE)
            return await handle.submit("the generator to say something", Worker.finish_save).result(timeout)

        try:
            return asyncio.run(act())
        except RunError as error:
            return error

    return call


USERS = [ValueError("no such column"), OSError(28, "No space left on device"), KeyError("a bug of a reward")]


@pytest.mark.parametrize("cause", USERS, ids=lambda cause: type(cause).__name__)
def test_an_exception_of_an_op_is_not_a_lost_worker(answer, cause) -> None:
    error = answer(failed_with(cause))
    assert type(error) is RunError
    assert str(cause) in error.cause
    assert error.details


LOSSES = [
    (exceptions.ActorDiedError(), WorkerDiedError, (WorkerId("generator", 1),)),
    (failed_with(EngineLostError("the server has died")), WorkerLostError, (WorkerId("generator", 1),)),
    (failed_with(PeerError("the sender of weights has ended")), WorkerLostError, ()),
    (failed_with(ObjectTimeoutError("waited 5 s for blocks")), WorkerLostError, ()),
    (failed_with(exceptions.OwnerDiedError("0" * 56, "", "")), WorkerLostError, ()),
    (exceptions.ObjectLostError("0" * 56, "", ""), WorkerLostError, ()),
]


@pytest.mark.parametrize(("failure", "kind", "lost"), LOSSES, ids=lambda each: type(each).__name__)
def test_a_lost_worker_is_named_if_it_is_known(answer, failure, kind, lost) -> None:
    error = answer(failure)
    assert type(error) is kind
    assert error.lost == lost
    assert error.worker == "generator/1 (host node7, pid 4711)"
    assert error.node == "the generator to say something"


FULL = [exceptions.OutOfDiskError(), exceptions.ObjectStoreFullError("Failed to put object 00ff. Object size is 9.")]


@pytest.mark.parametrize("in_worker", [False, True])
@pytest.mark.parametrize("failure", FULL, ids=lambda each: type(each).__name__)
def test_a_full_object_store_is_one_sentence(answer, failure, in_worker) -> None:
    error = answer(failed_with(failure) if in_worker else failure)
    assert isinstance(error, WorkerLostError)
    assert error.cause == "Ray's object store is full, and has no room on the disk"
    assert "TMPDIR" in error.hint


@pytest.mark.parametrize(
    ("answer", "timeout_s", "what"),
    [
        (exceptions.ActorDiedError(), 1800, "the worker's process died, in a call of rewards:exits, sample 12"),
        (60, 0.1, r"waited 0\.1 s for .*\(host node7, pid 4711\), which calls rewards:exits, sample 12"),
    ],
    ids=["dies", "does not answer"],
)
def test_a_function_that_a_lost_worker_called_is_named(tmp_path: Path, answer, timeout_s, what) -> None:
    file = tmp_path / CALLS / "node7-4711"
    file.parent.mkdir()
    file.write_bytes(b"rewards:exits, sample 12".ljust(1024))

    async def act() -> None:
        timeout = Timeout(timeout_s, "node_timeout_s")
        handle = WorkerHandle(WorkerId("host", 0), Actor(answer), timeout, HERE, run_dir=tmp_path)
        await handle.submit("a reward", Worker.finish_save).result()

    with pytest.raises(WorkerLostError, match=what):
        asyncio.run(act())


def test_a_worker_that_does_not_answer_is_lost_and_the_message_is_complete(answer) -> None:
    error = answer(5.0, 0.1)
    assert type(error) is WorkerHungError
    assert error.lost == (WorkerId("generator", 1),)
    assert error.cause == "waited 0.1 s for the generator to say something, from generator/1 (host node7, pid 4711)"
    assert (error.node, error.worker) == ("the generator to say something", "generator/1 (host node7, pid 4711)")
    assert error.hint == "raise run.node_timeout_s if it needs longer"


def test_a_worker_that_does_not_start_is_not_lost(answer) -> None:
    """A restart would take as long."""
    error = answer(5.0, 0.1, "start_timeout_s")
    assert type(error) is RunError
    assert error.hint == "raise run.start_timeout_s if it needs longer"


def test_an_answer_in_time_is_returned(answer) -> None:
    assert answer(0.0) == "answered"


class Streaming:
    """A worker that streams these messages of a task; an unread stream ends with the test."""

    def __init__(self, told: list[StreamMessage]) -> None:
        self._told, self._had_last = told, False

    @property
    def stream_task(self) -> Streaming:
        return self

    def remote(self, *message: Any) -> Streaming:
        return self

    def _get_next_ref_n(self, count: int) -> list[Any]:
        if self._told:
            return [Ready(None), Ready(serialize(self._told[0])[0])]
        assert not self._had_last, "asked for more behind the last word"
        return [Ready(exceptions.ObjectRefStreamEndOfStreamError()) for _ in range(count)]

    def _consume_next_ref_n(self, count: int) -> None:
        self._had_last = self._told.pop(0).last


class Ready:
    """A ref of an object that is ready, or has failed."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def binary(self) -> bytes:
        return b"id"

    def __await__(self) -> Iterator[Any]:
        yield from ()
        if isinstance(self._thing, Exception):
            raise self._thing
        return self._thing


@pytest.mark.parametrize("last", [True, False])
def test_a_stream_ends_with_its_last_message(last) -> None:
    worker = Streaming([StreamMessage((Heartbeat(0),)), StreamMessage((Heartbeat(1), Heartbeat(2)), last=last)])
    handle = WorkerHandle(WorkerId("generator", 0), worker, FOREVER, HERE)

    async def follow() -> list[Block | Heartbeat]:
        return [each async for each in handle.stream(work_of(RolloutWork, "rollout"), sizes.append)]

    sizes: list[int] = []
    assert asyncio.run(follow()) == [Heartbeat(0), Heartbeat(1), Heartbeat(2)]
    assert len(sizes) == 3, "a message there, two back"


class InARow:
    """A worker that runs tasks one after the other, each for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._through = seconds, 0.0

    @property
    def run_task(self) -> InARow:
        return self

    def remote(self, *message: Any) -> tuple[DueAt, Ready]:
        self._through = max(asyncio.get_running_loop().time(), self._through) + self._seconds
        return DueAt(self._through, serialize([])[0]), Ready(None)


class DueAt:
    """A ref that is ready at `when`; as with Ray's refs, a wait can be repeated after a timeout."""

    def __init__(self, when: float, thing: Any) -> None:
        self._when, self._thing = when, thing

    def __await__(self) -> Iterator[Any]:
        yield from asyncio.sleep(self._when - asyncio.get_running_loop().time()).__await__()
        return self._thing


class Skipping(selectors.DefaultSelector):
    """A selector that skips the time for which nothing is to be done, so that no busy machine makes a call late."""

    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.skipped_s += timeout or 0.0
        return super().select(0.0)


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose seconds are those that it has skipped."""

    def __init__(self) -> None:
        self._clock = Skipping()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.skipped_s


@pytest.mark.parametrize(("seconds", "in_time"), [(3.0, True), (6.0, False)])
def test_the_timeout_of_a_queued_call_starts_when_the_one_before_ends(seconds, in_time) -> None:
    handle = WorkerHandle(WorkerId("actor", 0), InARow(seconds), Timeout(4.0, "node_timeout_s"), HERE)
    works = [work_of(ScoreWork, name, step=1) for name in ("ref", "update")]

    async def both() -> list[Any]:
        sent = [handle.submit_task(work, lambda _: None) for work in works]
        return await asyncio.gather(*(each.result(lambda _: None) for each in sent), return_exceptions=True)

    if in_time:
        assert asyncio.run(both(), loop_factory=SkippingLoop) == [[], []]
    else:
        told = asyncio.run(both(), loop_factory=SkippingLoop)
        assert "the result of ref (step 1)" in str(told[0])


@pytest.mark.parametrize("answer", [OSError("the device is gone"), 60.0, 0.0])
def test_failures_to_close_are_ignored(lab, monkeypatch, caplog, answer) -> None:
    monkeypatch.setattr("dagrl.orchestrator.groups.worker_group._CLOSE_TIMEOUT_S", 0.05)
    ended: list[object] = []
    groups = WorkerGroups(Plan({}, (), shards=1, steps=1), Pipeline.model_validate(lab.tiny_pipeline()))
    workers = [Actor(answer), Actor(0.0)]
    handles = [WorkerHandle(WorkerId("actor", rank), each, FOREVER, HERE) for rank, each in enumerate(workers)]
    groups._groups = {"actor": WorkerGroup(handles)}
    monkeypatch.setattr(groups, "kill", lambda: ended.append(groups["actor"]))

    async def close() -> None:
        await groups.close()
        gc.collect()

    asyncio.run(close())
    assert len(ended) == 1
    assert caplog.records == []


class Calls:
    """An actor that notes what it is called with."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    @property
    def call(self) -> Calls:
        return self

    def remote(self, *message: Any) -> Ready:
        self.messages.append(message)
        return Ready(len(self.messages))


def test_a_call_of_all_ranks_names_the_function_and_is_serialized_once() -> None:
    actors = [Calls(), Calls()]
    group = WorkerGroup(
        WorkerHandle(WorkerId("actor", rank), actor, FOREVER, HERE) for rank, actor in enumerate(actors)
    )
    assert asyncio.run(group.call_all("actor to save", Worker.save, Path("here"), asynchronous=True)) == [1, 1]
    (first,), (second,) = (actor.messages for actor in actors)
    assert first[0] is second[0]
    assert deserialize(*first) == (Worker.save, (Path("here"),), {"asynchronous": True})
