"""Where a generator's rank gets its weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from dagrl.weight_sync.channel import Address
from dagrl.weight_sync.exporter import BucketExporter, packed
from dagrl.weight_sync.protocol import Offer
from dagrl.workers import weight_transfer
from dagrl.workers.messages import SendResult, UpdateWeightsRequest
from dagrl.workers.weight_transfer import update_weights

DOORS = [Address(f"/tmp/{rank}", "", 0, f"token {rank}") for rank in (0, 1)]


class Generator:
    """Keeps what it was told."""

    def update_weights(self, route: Any, version: int) -> None:
        self.told = route.number, dict(route.senders), route.timeout_s, version


@pytest.mark.parametrize(
    ("offers", "senders"),
    [
        # Each of the server's processes knows its GPU.
        ([Offer(DOORS[0], "GPU-a"), Offer(DOORS[1], "GPU-b")], {"GPU-a": DOORS[0], "GPU-b": DOORS[1]}),
        # On CPUs the neighbour on the same slot.
        ([Offer(DOORS[0], ""), Offer(DOORS[1], "")], {"": DOORS[1]}),
        # By broadcast all come to the first rank.
        ([Offer(DOORS[0], ""), None], {"": DOORS[0]}),
    ],
    ids=["gpus", "cpus", "broadcast"],
)
def test_a_rank_receives_weights_from_a_rank_that_it_can_reach(offers, senders):
    generator = Generator()
    seconds = update_weights(generator, 1, UpdateWeightsRequest(7, 3, tuple(offers)), [], 20.0)
    assert generator.told == (7, senders, 20.0, 3)
    assert 0 <= seconds < 5


def test_buckets_of_all_owners_are_loaded_in_the_order_of_the_manifest(monkeypatch):
    buckets = [[(f"t{index}", torch.tensor([index]))] for index in range(3)]
    # As an object store does: a packed bucket is valid until the next one is requested.
    store = {index: copy.deepcopy(bucket) for index, bucket in packed(BucketExporter(buckets), 0)}
    monkeypatch.setattr(weight_transfer, "get_objects", lambda refs, timeout_s, what: [store[ref] for ref in refs])
    loaded = []

    class Follower:
        def load_weights(self, buckets: Any, version: int) -> None:
            loaded.extend((name, int(tensor), version) for bucket in buckets for name, tensor in bucket)

    sent = [SendResult(0.1, 8, refs={0: 0, 2: 2}), SendResult(0.1, 8), SendResult(0.1, 8, refs={1: 1})]
    update_weights(Follower(), 0, UpdateWeightsRequest(7, 3), sent, 20.0)
    assert loaded == [("t0", 0, 3), ("t1", 1, 3), ("t2", 2, 3)]
