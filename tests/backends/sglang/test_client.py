"""What a server tells of itself."""

from __future__ import annotations

import pytest

from dagrl.backends.serving.client import Capacity
from dagrl.backends.sglang.client import capacity_of


def state(tokens: int, *, page_size: int = 1, dcp_size: int = 1) -> dict[str, object]:
    return {
        "memory_usage": {"token_capacity": tokens},
        "effective_max_running_requests_per_dp": 8,
        "page_size": page_size,
        "dcp_size": dcp_size,
    }


@pytest.mark.parametrize(
    ("states", "capacity"),
    [
        ([state(1000)], Capacity(8, 1000, 992, 4096, 512)),
        ([state(1024, page_size=64)], Capacity(8, 1024, 896, 4096, 512)),
        # A request lies in one cache of several, and in both halves of one that is spread over two.
        ([state(1000), state(900)], Capacity(16, 1900, 892, 4096, 512)),
        ([state(1000, dcp_size=2)], Capacity(8, 1000, 1992, 4096, 512)),
    ],
)
def test_the_longest_sample_has_to_fit_into_one_cache(states, capacity) -> None:
    assert capacity_of(states, context=4096, vocabulary=512) == capacity
