"""What workers do in a weight sync: the trainer's ranks hand the weights out, the generator's take them in.

`dagrl.workers.groups.weight_syncs` brings the two together, in the driver. What is done is in `dagrl.weight_sync`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import ray

from dagrl.scheduler.weight_route import WeightRoute
from dagrl.weight_sync.manifest import Bucket
from dagrl.weight_sync.object_store import PackedBucket, packed
from dagrl.weight_sync.protocol import Offer
from dagrl.weight_sync.receiver import Route
from dagrl.weight_sync.sender import WeightSender
from dagrl.workers.messages import Handed, Take
from dagrl.workers.objects import get_within


class HandingOut:
    """A trainer's rank as the source of one follower's weights."""

    def __init__(self, engine: Any, rank: int, route: WeightRoute, timeout_s: float) -> None:
        """Every wait for the other side has the bound `timeout_s`."""
        self._rank, self._route = rank, route
        self._exporter = engine.weight_exporter(route.bucket_bytes)
        self._sender: WeightSender | None = None
        if route.way != "object_store":
            self._sender = WeightSender(
                self._exporter,
                "near" if route.way == "cuda_ipc" else "far",
                host=ray.util.get_node_ip_address(),
                timeout_s=timeout_s,
            )
        # Refs that travel in a message are not counted reliably until it is there: they are kept until the next sync.
        self._refs: list[ray.ObjectRef] = []

    def offer(self) -> Offer | None:
        """Where the follower's processes find this rank, if they need it."""
        return self._sender.offer() if self._sender else None

    def hand_out(self, number: int) -> Handed:
        """Hand all weights out for sync `number`. Collective over the trainer's ranks."""
        begun = time.perf_counter()
        if self._sender is None:
            self._refs = []
            self._refs = [ray.put(bucket) for bucket in packed(self._exporter, is_root=self._rank == 0)]
            return Handed(time.perf_counter() - begun, self._exporter.manifest.nbytes, refs=tuple(self._refs))
        sent = self._sender.send(number, self._takers(), passes=self._route.passes)
        return Handed(time.perf_counter() - begun, sent.nbytes, sent)

    def rest(self) -> None:
        """Give up what is on the device between syncs: communicators."""
        if self._sender is not None:
            self._sender.rest()

    def close(self) -> None:
        """Hand nothing out any more."""
        if self._sender is not None:
            self._sender.close()

    def _takers(self) -> list[int]:
        """How many come to this rank, wave after wave: its neighbour on the slot, or all to the first rank."""
        if self._route.way == "cuda_ipc":
            return [int(self._rank in wave) for wave in self._route.waves]
        return [len(wave) if self._rank == 0 else 0 for wave in self._route.waves]


def take_in(engine: Any, rank: int, take: Take, handed: Handed | None, timeout_s: float) -> float:
    """Have a generator's rank take new weights; returns how long it took, in seconds.

    `handed`: what a trainer has handed out through the object store, if they come that way.
    """
    begun = time.perf_counter()
    if handed is not None:
        engine.load_weights(_fetched(handed.refs, timeout_s), take.version)
    else:
        engine.take_weights(_route(take, rank, timeout_s), take.version)
    return time.perf_counter() - begun


def _fetched(refs: tuple[ray.ObjectRef, ...], timeout_s: float) -> Iterator[Bucket]:
    for ref in refs:
        bucket: PackedBucket = get_within([ref], timeout_s, "a bucket of weights")[0]
        yield bucket.unpack()


def _route(take: Take, rank: int, timeout_s: float) -> Route:
    offers = [offer for offer in take.offers if offer is not None]
    if all(offer.place for offer in offers):
        senders = {offer.place: offer.address for offer in offers}
        return Route(take.number, senders, timeout_s, take.keeps_room)
    # Without a GPU to go by: the neighbour on the same slot, or the one sender that there is.
    offer = offers[rank] if len(offers) > 1 else offers[0]
    return Route(take.number, {"": offer.address}, timeout_s, take.keeps_room)
