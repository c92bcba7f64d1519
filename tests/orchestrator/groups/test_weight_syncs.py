"""The two sides of a sync are called together, unless the weights lie in the object store between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from dagrl.config.schema import Pipeline
from dagrl.ops.work import PendingWeights
from dagrl.orchestrator.groups import weight_syncs
from dagrl.orchestrator.groups.weight_syncs import WeightSyncs
from dagrl.scheduler.commands import Sync
from dagrl.scheduler.plan import WorkerId
from dagrl.weight_sync.channel import Address, PeerError
from dagrl.weight_sync.protocol import Offer, SendReport
from dagrl.workers.errors import RunError, WorkerDiedError
from dagrl.workers.messages import SendResult, UpdateWeightsRequest
from dagrl.workers.worker import Worker

SYNC = Sync(3, "generator", "actor", 2)
OFFER = Offer(Address("/tmp/door", "", 0, "token"), "GPU-1")


def pipeline(**generator: Any) -> Pipeline:
    return Pipeline.model_validate(
        {
            "name": "test",
            "model": {"init": {"model_type": "qwen3"}},
            "data": {"train": "t.parquet", "prompts_per_step": 1, "max_prompt_tokens": 4},
            "groups": {"all": {"gpus_per_node": 2}},
            "engines": {
                "actor": {"backend": "megatron", "group": "all"},
                "generator": {"weights_from": "actor", "group": "all", **generator},
            },
            "nodes": {"rollout": {"op": "rollout", "engine": "generator", "sampling": {"max_new_tokens": 4}}},
            "run": {"steps": 1},
        }
    )


class Call:
    """A call that is being worked on; other workers may wait for its ref too."""

    def __init__(self, work: Coroutine[Any, Any, Any], worker: str) -> None:
        self.ref, self._worker = asyncio.ensure_future(work), worker

    async def result(self) -> Any:
        return await self.ref


class Group:
    """The workers of one executor."""

    by_rank = (0, 1)

    def __init__(self, workers: Workers, executor: str) -> None:
        self._workers, self._executor = workers, executor

    async def call_all(self, waits_for: str, method: Callable[..., Any], *args: Any) -> list[Any]:
        assert (method, waits_for) == (Worker.offer_weights, "the weights of actor to reach generator")
        self._workers.log.append((self._executor, method, args))
        return [OFFER, None]

    def submit_all(self, waits_for: str, method: Callable[..., Any], *args: Any) -> list[Call]:
        assert waits_for == "the weights of actor to reach generator"
        self._workers.log.append((self._executor, method, args))
        act = self._workers.send if method is Worker.send_weights else self._workers.receive
        return [self._workers.call(act(rank), f"{self._executor}/{rank}") for rank in (0, 1)]


class Workers:
    """Stands in for two workers on each side. A sync ends only when both sides are in it."""

    call = Call

    def __init__(self, used: tuple[int | None, ...] = (0b01, 0b10), meet: bool = True, lost: str = "") -> None:
        self.used, self.log, self._inside, self._meet, self._lost = used, [], asyncio.Event(), meet, lost
        self.left: list[str] = []

    def __getitem__(self, executor: str) -> Group:
        return Group(self, executor)

    async def _handed(self) -> None:
        """Wait like receivers that read from the object store."""
        if not self._meet:
            ((_, _, (take,)),) = [each for each in self.log if each[1] is Worker.receive_weights]
            await asyncio.gather(*take.send_results)

    async def send(self, rank: int) -> SendResult:
        if self._lost == f"actor/{rank}":
            raise lost(self._lost)
        if self._meet:
            await asyncio.wait_for(self._inside.wait(), 5)
        if self._lost:
            # Those who are left with the failure have some way to go to the end.
            await asyncio.sleep(0.1)
            self.left.append(f"actor/{rank}")
            if rank == 0 and self._meet:
                raise RunError("generator/1 has ended")
        names = ("a", "b")
        sent = [SendReport(8, used, names if used is not None else ()) for used in self.used]
        return SendResult(0.5 + rank, 8_000_000, sent[rank] if self._meet else None, {rank: "ref"})

    async def receive(self, rank: int) -> float:
        self._inside.set()
        await self._handed()
        if self._lost == f"generator/{rank}":
            raise lost(self._lost)
        return 0.25 + rank / 2


def lost(name: str) -> WorkerDiedError:
    error = WorkerDiedError(f"{name} died")
    error.lost = (WorkerId.parse(name),)
    return error


def carry_out(workers: Workers, given: Pipeline, times: int = 1) -> list[dict[str, float]]:
    async def update() -> None:
        """No update is running."""

    async def act() -> list[dict[str, float]]:
        syncs = WeightSyncs(workers, given)  # type: ignore[arg-type]
        return [await syncs.run(SYNC, update) for _ in range(times)]

    return asyncio.run(act())


def test_both_sides_are_called_together_and_endpoints_are_asked_for_once():
    workers = Workers()
    first, second = carry_out(workers, pipeline(backend="sglang"), times=2)
    assert first == second == {"sync/gb": 0.008, "sync/send_s": 1.5, "sync/receive_s": 0.75}
    methods = [method for _, method, _ in workers.log]
    assert methods == [Worker.offer_weights, *[Worker.receive_weights, Worker.send_weights] * 2]
    takes = [args[0] for _, method, args in workers.log if method is Worker.receive_weights]
    assert takes == [UpdateWeightsRequest(1, 2, (OFFER, None)), UpdateWeightsRequest(2, 2, (OFFER, None))]
    assert [args[2] for _, method, args in workers.log if method is Worker.send_weights] == [1, 2]


def test_weights_are_in_the_object_store_before_they_are_received():
    workers = Workers(meet=False)
    carry_out(workers, pipeline(backend="hf"))
    methods = [(executor, method) for executor, method, _ in workers.log]
    assert methods == [("actor", Worker.send_weights), ("generator", Worker.receive_weights)]
    ((take,),) = [args for _, method, args in workers.log if method is Worker.receive_weights]
    assert (take.sync, take.version) == (1, 2)
    assert [result.result().refs for result in take.send_results] == [{0: "ref"}, {1: "ref"}]


@pytest.mark.parametrize("backend", ["hf", "sglang"])
def test_a_send_through_the_object_store_is_queued_behind_the_update(backend):
    """Transports in which both sides meet must wait: servers in a sync do nothing else."""
    workers, seen = Workers(meet=backend == "sglang"), []
    syncs = WeightSyncs(workers, pipeline(backend=backend))  # type: ignore[arg-type]

    async def ahead() -> None:
        await asyncio.sleep(0.02)
        seen.append(([method for _, method, _ in workers.log], syncs.pending("generator")))

    assert syncs.pending("generator") is None
    asyncio.run(syncs.run(SYNC, ahead))
    assert seen == [([Worker.send_weights] if backend == "hf" else [], PendingWeights(1, 2))]
    assert syncs.pending("generator") is None


def test_a_failed_update_ends_the_sync_with_its_failure():
    workers = Workers(meet=False, lost="actor/1")

    async def ahead() -> None:
        await asyncio.sleep(0.02)
        raise RunError("the loss is not a number")

    with pytest.raises(RunError, match="the loss is not a number"):
        asyncio.run(WeightSyncs(workers, pipeline(backend="hf")).run(SYNC, ahead))  # type: ignore[arg-type]
    assert Worker.receive_weights not in [method for _, method, _ in workers.log]


class LateCall(Call):
    """A call whose failure names the worker, and arrives late from a sender."""

    async def result(self) -> Any:
        if self._worker.startswith("actor"):
            await asyncio.sleep(0.1)
        try:
            return await super().result()
        except RunError as error:
            raise RunError(error.cause, worker=self._worker) from error


class FullStore(Workers):
    """Two workers on each side. One sender cannot store its buckets, which the receivers report first."""

    call = LateCall

    def __init__(self, failing: int) -> None:
        super().__init__(meet=False)
        self._failing = failing

    async def send(self, rank: int) -> SendResult:
        if rank == self._failing:
            await asyncio.sleep(0.02)
            raise RunError("the object store is full", worker=f"actor/{rank}")
        return await super().send(rank)


@pytest.mark.parametrize("failing", [0, 1])
def test_the_failure_of_an_owner_is_raised_and_not_that_of_a_receiver(failing):
    with pytest.raises(RunError, match="the object store is full") as caught:
        carry_out(FullStore(failing), pipeline(backend="hf"))
    assert caught.value.worker == f"actor/{failing}"
    assert isinstance(caught.value.__cause__, RunError), "what has become of it is still known"


def test_weights_that_no_rank_of_the_generator_knows_end_the_run():
    with pytest.raises(RunError, match=r"the generator has no parameter for b; use the same model") as caught:
        carry_out(Workers(used=(0b01, None)), pipeline(backend="sglang"))
    assert caught.value.node == "the weights of actor to reach generator"


@pytest.mark.parametrize("meet", [True, False])
def test_a_lost_receiver_is_reported_after_all_others_have_left_the_sync(meet, monkeypatch):
    told = []

    def connect(address: Address, timeout_s: float, whose: str, **hello: Any) -> Any:
        told.append((address, hello))
        raise PeerError("it is through already")

    monkeypatch.setattr(weight_syncs, "connect", connect)
    workers = Workers(meet=meet, lost="generator/1")
    with pytest.raises(WorkerDiedError, match="generator/1 died"):
        carry_out(workers, pipeline(backend="sglang" if meet else "hf"))
    assert sorted(workers.left) == ["actor/0", "actor/1"]
    # Of two takers either may be missing.
    excuse = (OFFER.address, {"who": "generator/1", "sync": 1, "error": "is lost"})
    assert told == ([excuse] * 2 if meet else [])


@pytest.mark.parametrize("name", ["actor/0", "actor/1"])
@pytest.mark.parametrize("backend", ["sglang", "hf"])
def test_a_lost_owner_is_reported_at_once(backend, name):
    workers = Workers(lost=name, meet=backend == "sglang")
    with pytest.raises(WorkerDiedError, match=f"{name} died"):
        carry_out(workers, pipeline(backend=backend))
