import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from dagrl.backends.backend import RankContext
from dagrl.backends.megatron.section import ParallelSpec


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Where ranks meet. It is bound and no more: rank 0 inherits it and listens, so that no other process is there."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def ranks_at(listener: socket.socket, rank: int, world_size: int, timeout_s: float = 60.0) -> RankContext:
    port = listener.getsockname()[1]
    listen_fd = listener.detach() if rank == 0 else None
    return RankContext(rank, world_size, "127.0.0.1", port, timeout_s, 1, listen_fd)


def test_tensor_parallel_ranks_are_neighbours(run_ranks, listener: socket.socket) -> None:
    def on_rank(rank: int) -> Any:
        from megatron.core import parallel_state

        from dagrl.backends.megatron.engine import distributed

        distributed.start(ranks_at(listener, rank, 4), ParallelSpec(tensor_model_parallel_size=2))
        place = parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
        distributed.stop()
        return place

    assert run_ranks(4, on_rank, joined=False) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_generators_are_seeded_alike_except_where_tensor_parallel_ranks_must_differ(
    run_ranks, listener: socket.socket
) -> None:
    def on_rank(rank: int) -> Any:
        import torch
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        from dagrl.backends.megatron.engine import distributed

        distributed.start(ranks_at(listener, rank, 2), ParallelSpec(tensor_model_parallel_size=2))
        with get_cuda_rng_tracker().fork():
            own = torch.rand(1).item()
        return torch.rand(1).item(), own

    first, second = run_ranks(2, on_rank, joined=False)
    assert first[0] == second[0] and first[1] != second[1]


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, r"rank 0 of 2 waited \d+ s for the other 1 ranks at 127\.0\.0\.1:"),
        (1, r"rank 1 of 2 waited \d+ s for rank 0 at 127\.0\.0\.1:"),
    ],
)
def test_a_timeout_names_the_awaited_rank_the_place_and_the_time(
    run_ranks, listener: socket.socket, rank: int, message: str
) -> None:
    def on_rank(_: int) -> None:
        from dagrl.backends.megatron.engine import distributed

        # The store's C++ code complains in its own words too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with pytest.raises(TimeoutError, match=message):
            distributed.start(ranks_at(listener, rank, 2, timeout_s=1.0), ParallelSpec())

    run_ranks(1, on_rank, joined=False)


def test_a_port_that_is_taken_is_named(run_ranks) -> None:
    def on_rank(_: int) -> None:
        from dagrl.backends.megatron.engine import distributed

        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            place = taken.getsockname()[1]
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with pytest.raises(OSError, match=f"rank 0 cannot listen on 127.0.0.1:{place}: the port is taken"):
                distributed.start(RankContext(0, 1, "127.0.0.1", place, 5.0, 1), ParallelSpec())

    run_ranks(1, on_rank, joined=False)
