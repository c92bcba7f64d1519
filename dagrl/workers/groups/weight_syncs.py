"""Brings the weights of a trained engine to one that follows it: calls both sides, and says what it took."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from dagrl.config.schema import Pipeline
from dagrl.scheduler.commands import Sync
from dagrl.scheduler.weight_route import WeightRoute, weight_route
from dagrl.weight_sync.channel import Address, PeerError, knock
from dagrl.weight_sync.protocol import Offer, refuse_unknown_names
from dagrl.workers.errors import RunError, WorkerHungError, WorkerLostError
from dagrl.workers.groups.task_group import together
from dagrl.workers.groups.worker_group import Asked, Fleet
from dagrl.workers.messages import Coming, Handed, Take

_KNOCK_S = 2.0
_LEAVE_S = 120.0
"""How long it may take until everybody has left a sync in which a follower's worker was lost: they go through the rest
of the buckets."""


async def _nothing() -> None:
    """Nobody is ahead."""


class WeightSyncs:
    """All syncs of a run."""

    def __init__(self, fleet: Fleet, pipeline: Pipeline) -> None:
        self._fleet, self._pipeline = fleet, pipeline
        self._routes: dict[str, WeightRoute] = {}
        self._offers: dict[str, tuple[Offer | None, ...]] = {}
        self._number = 0
        self._coming: dict[str, Coming] = {}

    def coming(self, follower: str) -> Coming | None:
        """The weights that are on their way to a follower, if there are any."""
        return self._coming.get(follower)

    async def carry_out(self, sync: Sync, ahead: Callable[[], Awaitable[None]] = _nothing) -> dict[str, float]:
        """Have the follower hold the source's weights; figures of it, for metrics. RunError where it does not.

        `ahead` waits for what the source is at, and raises what becomes of it: weights that may lie about are handed
        out behind that, without a message in between.
        """
        self._number += 1
        self._coming[sync.follower] = Coming(self._number, sync.version)
        try:
            return await self._carry_out(sync, ahead)
        finally:
            del self._coming[sync.follower]

    async def _carry_out(self, sync: Sync, ahead: Callable[[], Awaitable[None]]) -> dict[str, float]:
        route = self._routes.setdefault(sync.follower, weight_route(self._pipeline, sync.follower))
        if route.way == "object_store":
            took, handed = await self._through_store(sync, route, ahead)
        else:
            await ahead()
            offers = await self._offers_to(sync, route)
            take = Take(self._number, sync.version, offers, keeps_room=route.keeps_room)
            # Those who receive have the longer way to go.
            receiving = self._receive(sync, take)
            sending = [self._fleet.hear(each) for each in self._send(sync, route)]
            results = await self._left_in_order(sync, [*receiving, *sending], offers, len(route.waves[0]))
            took, handed = results[: len(receiving)], results[len(receiving) :]
            try:
                refuse_unknown_names([each.sent for each in handed if each.sent is not None])
            except ValueError as error:
                raise RunError(str(error), node=_what(sync)) from error
        return {
            "sync/gb": handed[0].nbytes / 1e9,
            "sync/send_s": max(each.seconds for each in handed),
            "sync/receive_s": max(took),
        }

    async def _through_store(
        self, sync: Sync, route: WeightRoute, ahead: Callable[[], Awaitable[None]]
    ) -> tuple[list[float], list[Handed]]:
        """What those who receive have to say, and those who send."""
        sending = self._send(sync, route)
        sent = asyncio.ensure_future(together([self._fleet.hear(each) for each in sending]))
        try:
            await ahead()
            # All buckets are the first rank's. They are waited for where they are taken: nobody has to be told here.
            receiving = self._receive(sync, Take(self._number, sync.version, handed=sending[0].answer))
            try:
                told = await self._left_in_order(sync, [*receiving, _of(sent)])
            except RunError:
                if sent.done() and (failure := sent.exception()):
                    # Of which those who receive tell as well.
                    raise failure from failure.__cause__
                raise
        finally:
            sent.cancel()
            # Nobody asks for what else has failed.
            await asyncio.gather(sent, return_exceptions=True)
        return told[:-1], told[-1]

    async def _offers_to(self, sync: Sync, route: WeightRoute) -> tuple[Offer | None, ...]:
        """Where the follower finds the source's ranks, which stays."""
        if sync.follower not in self._offers:
            asked = sync.source, "offer_weights", sync.follower, route
            self._offers[sync.follower] = tuple(await self._fleet.call_all(*asked, waits_for=_what(sync)))
        return self._offers[sync.follower]

    def _send(self, sync: Sync, route: WeightRoute) -> list[Asked]:
        """Have the weights handed out; what is heard of each is `Handed`."""
        source, follower = sync.source, sync.follower
        return self._fleet.ask_all(source, "send_weights", follower, route, self._number, waits_for=_what(sync))

    def _receive(self, sync: Sync, take: Take) -> list[Coroutine[Any, Any, float]]:
        """Have them taken; what is heard, in seconds."""
        asked = self._fleet.ask_all(sync.follower, "receive_weights", take, waits_for=_what(sync))
        return [self._fleet.hear(each) for each in asked]

    async def _left_in_order(
        self,
        sync: Sync,
        calls: Sequence[Coroutine[Any, Any, Any]],
        offers: Sequence[Offer | None] = (),
        takers: int = 0,
    ) -> list[Any]:
        """All results. Where workers of the follower are lost, the failure comes when everybody else has left the sync.

        The next one may begin at once then. WorkerHungError where somebody does not leave it. Whoever makes an offer
        may wait for up to so many `takers` that do not come any more: it is told.
        """
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            return await together([_of(task) for task in tasks])
        except WorkerLostError as loss:
            if loss.lost and all(name.rpartition("/")[0] == sync.follower for name in loss.lost):
                senders = [offer.address for offer in offers if offer is not None]
                await asyncio.to_thread(_excuse, senders * takers, self._number, ", ".join(loss.lost))
                _, staying = await asyncio.wait(tasks, timeout=_LEAVE_S)
                if staying:
                    raise WorkerHungError(
                        f"waited {_LEAVE_S:g} s for {sync.source} and {sync.follower} to leave a weight sync in which "
                        f"{', '.join(loss.lost)} was lost",
                        worker=loss.worker,
                    ) from loss
            raise
        finally:
            for task in tasks:
                task.cancel()
            # Nobody asks for what else has failed.
            await asyncio.gather(*tasks, return_exceptions=True)


def _what(sync: Sync) -> str:
    """What is waited for."""
    return f"the weights of {sync.source} to reach {sync.follower}"


def _excuse(senders: Sequence[Address], number: int, who: str) -> None:
    """Tell senders, instead of those who are lost, that they do not come to sync `number`.

    Those that are through with it, or on another machine behind a door that only their neighbours find, notice by
    themselves, or are waited for in vain.
    """
    for address in senders:
        with contextlib.suppress(PeerError):
            knock(address, _KNOCK_S, "the sender of weights", who=who, sync=number, error="is lost").close()


async def _of(task: asyncio.Task[Any]) -> Any:
    return await asyncio.shield(task)
