"""The fixture that all multi-rank tests stand on: it must report, and must not hang."""

import os
import time

import pytest
import torch
import torch.distributed as dist


def test_each_rank_answers_in_rank_order(run_ranks) -> None:
    def add_up(rank: int, offset: int) -> float:
        total = torch.tensor(float(rank + offset))
        dist.all_reduce(total)
        return 10 * rank + total.item()

    assert run_ranks(2, add_up, 5) == [11.0, 21.0]


def test_an_exception_on_one_rank_fails_the_test_with_its_traceback(run_ranks) -> None:
    def fail_on_the_second(rank: int) -> None:
        if rank == 1:
            raise RuntimeError("the reason")
        dist.barrier()

    with pytest.raises(pytest.fail.Exception, match=r"rank 1:(.|\n)*fail_on_the_second(.|\n)*the reason"):
        run_ranks(2, fail_on_the_second)


def test_a_rank_that_dies_fails_the_test_at_once(run_ranks) -> None:
    def die_on_the_first(rank: int) -> None:
        if rank == 0:
            os._exit(1)
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match="rank 0 died"):
        run_ranks(2, die_on_the_first)
    assert time.monotonic() - started < 20
