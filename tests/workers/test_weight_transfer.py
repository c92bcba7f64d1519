"""Where a generator's rank is sent for its weights."""

from __future__ import annotations

from typing import Any

import pytest

from dagrl.weight_sync.channel import Address
from dagrl.weight_sync.protocol import Offer
from dagrl.workers.messages import UpdateWeightsRequest
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
def test_a_rank_is_sent_to_whom_it_can_take_weights_from(offers, senders):
    generator = Generator()
    seconds = update_weights(generator, 1, UpdateWeightsRequest(7, 3, tuple(offers)), [], 20.0)
    assert generator.told == (7, senders, 20.0, 3)
    assert 0 <= seconds < 5
