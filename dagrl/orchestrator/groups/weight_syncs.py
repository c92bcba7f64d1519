"""Weight syncs: calls the trainer's and the generator's workers, and measures the time of a sync."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from dagrl.config.schema import Pipeline
from dagrl.ops.work import PendingWeights
from dagrl.orchestrator.groups.task_group import run_all
from dagrl.orchestrator.groups.worker_group import WorkerGroups
from dagrl.orchestrator.groups.worker_handle import PendingCall
from dagrl.scheduler.commands import Sync
from dagrl.scheduler.weight_route import WeightRoute, weight_route
from dagrl.weight_sync.channel import Address, PeerError, connect
from dagrl.weight_sync.protocol import Offer, refuse_unknown_names
from dagrl.workers.errors import RunError, WorkerHungError, WorkerLostError
from dagrl.workers.messages import SendResult, UpdateWeightsRequest
from dagrl.workers.worker import Worker

_CONNECT_S = 2.0
_LEAVE_S = 120.0
"""Timeout for the others to leave a sync in which a generator's worker was lost: they process all buckets."""


class WeightSyncs:
    """All weight syncs of a run."""

    def __init__(self, groups: WorkerGroups, pipeline: Pipeline) -> None:
        self._groups, self._pipeline = groups, pipeline
        self._routes: dict[str, WeightRoute] = {}
        self._offers: dict[str, tuple[Offer | None, ...]] = {}
        self._number = 0
        self._pending: dict[str, PendingWeights] = {}

    def pending(self, follower: str) -> PendingWeights | None:
        return self._pending.get(follower)

    async def run(self, sync: Sync, update: Callable[[], Awaitable[None]]) -> dict[str, float]:
        """Send the source's weights to the follower; returns metrics. Raises RunError.

        `update` waits for the update that is running on the source, and raises its failure. Through the object store
        the sender's call is queued behind the update, which saves a round trip.
        """
        self._number += 1
        self._pending[sync.follower] = PendingWeights(self._number, sync.version)
        try:
            route = self._routes.setdefault(sync.follower, weight_route(self._pipeline, sync.follower))
            route = route.to(self._groups[sync.follower].by_rank)
            through_store = route.way == "object_store"
            seconds, sent = await (self._through_store if through_store else self._direct)(sync, route, update)
        finally:
            del self._pending[sync.follower]
        return {
            "sync/gb": sent[0].nbytes / 1e9,
            "sync/send_s": max(rank.seconds for rank in sent),
            "sync/receive_s": max(seconds),
        }

    async def _direct(
        self, sync: Sync, route: WeightRoute, update: Callable[[], Awaitable[None]]
    ) -> tuple[list[float], list[SendResult]]:
        """Over CUDA IPC or NCCL: both sides are called at the same time. Returns the results of both."""
        await update()
        if sync.follower not in self._offers:
            offers = await self._groups[sync.source].call_all(_what(sync), Worker.offer_weights, sync.follower, route)
            self._offers[sync.follower] = tuple(offers)
        endpoints = self._offers[sync.follower]
        request = UpdateWeightsRequest(self._number, sync.version, endpoints, keep_buffers=route.keep_buffers)
        # The receivers take longer to get ready.
        receiving = self._receive(sync, request)
        sending = [call.result() for call in self._send(sync, route)]
        results = await self._join(sync, [*receiving, *sending], endpoints, len(route.waves[0]))
        seconds, sent = results[: len(receiving)], results[len(receiving) :]
        try:
            refuse_unknown_names([rank.sent for rank in sent if rank.sent is not None])
        except ValueError as error:
            raise RunError(str(error), node=_what(sync)) from error
        return seconds, sent

    async def _through_store(
        self, sync: Sync, route: WeightRoute, update: Callable[[], Awaitable[None]]
    ) -> tuple[list[float], list[SendResult]]:
        """Through the object store, which holds the weights until the receivers read them."""
        calls = self._send(sync, route)
        sending = asyncio.ensure_future(run_all([call.result() for call in calls]))
        try:
            await update()
            # Each rank stores the buckets that it owns. The receivers wait for the results themselves.
            results = tuple(call.ref for call in calls)
            request = UpdateWeightsRequest(self._number, sync.version, send_results=results)
            try:
                *seconds, sent = await self._join(sync, [*self._receive(sync, request), asyncio.shield(sending)])
            except RunError:
                if sending.done() and (failure := sending.exception()):
                    # The receivers only repeat the sender's failure.
                    raise failure from failure.__cause__
                raise
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        return seconds, sent

    def _send(self, sync: Sync, route: WeightRoute) -> list[PendingCall[SendResult]]:
        group = self._groups[sync.source]
        return group.submit_all(_what(sync), Worker.send_weights, sync.follower, route, self._number)

    def _receive(self, sync: Sync, request: UpdateWeightsRequest) -> list[Coroutine[Any, Any, float]]:
        calls = self._groups[sync.follower].submit_all(_what(sync), Worker.receive_weights, request)
        return [call.result() for call in calls]

    async def _join(
        self, sync: Sync, calls: Sequence[Awaitable[Any]], offers: Sequence[Offer | None] = (), receivers: int = 0
    ) -> list[Any]:
        """All results. If workers of the follower are lost, the failure is raised after all others have left the sync.

        Then the next sync may start at once. Raises WorkerHungError if one does not leave. Each sender may wait for up
        to `receivers` lost ones; a message ends that wait.
        """
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            return await run_all([_result_of(task) for task in tasks])
        except WorkerLostError as loss:
            if loss.lost and all(worker.executor == sync.follower for worker in loss.lost):
                senders = [offer.address for offer in offers if offer is not None]
                lost = ", ".join(map(str, loss.lost))
                await asyncio.to_thread(_report_lost, senders * receivers, self._number, lost)
                if (await asyncio.wait(tasks, timeout=_LEAVE_S))[1]:
                    raise WorkerHungError(
                        f"waited {_LEAVE_S:g} s for {sync.source} and {sync.follower} to leave a weight sync in which "
                        f"{lost} was lost",
                        worker=loss.worker,
                    ) from loss
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _what(sync: Sync) -> str:
    return f"the weights of {sync.source} to reach {sync.follower}"


def _report_lost(senders: Sequence[Address], sync: int, lost: str) -> None:
    """Notify senders that lost receivers will not connect. The notification times out for finished or unreachable
    senders.
    """
    for address in senders:
        with contextlib.suppress(PeerError):
            connect(address, _CONNECT_S, "the sender of weights", who=lost, sync=sync, error="is lost").close()


async def _result_of(task: asyncio.Future[Any]) -> Any:
    return await asyncio.shield(task)
