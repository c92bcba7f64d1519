from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dagrl.backends.megatron.engine import communicators

OWN = {
    *("rank", "size", "group_name", "group_desc", "_set_group_name", "_set_group_desc", "get_group_store", "_id"),
    *("shutdown", "abort", "_device_types", "bound_device_id", "boxed", "unbox"),
    # How torch makes and fills a group; nobody asks it of one that exists.
    *("_register_backend", "_set_default_backend", "split_group", "merge_remote_group", "_pybind11_conduit_v1_"),
    *("BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL"),
}


def test_everything_that_torch_asks_of_a_group_is_answered() -> None:
    known = {name for name in vars(dist.ProcessGroup) if not name.startswith("__")}
    assert known == OWN | set(communicators._DELEGATED), "this version of torch has other methods"


@pytest.fixture
def on_ranks(run_ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """``on_ranks(world_size, function)``: ``function(rank)`` with a default group of reloadable gloo groups."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def joined(rank: int, world_size: int, function: Callable[[int], Any]) -> Any:
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        backend = communicators.reloadable("gloo")
        dist.init_process_group(backend, store=own, rank=rank, world_size=world_size)
        return function(rank)

    return lambda world_size, function: run_ranks(world_size, joined, world_size, function, joined=False)


def all_sums(groups: list[Any], rank: int) -> list[float]:
    """What each group's members add up to, by several collectives; a group that this rank is not in gives -1."""
    sums = []
    for group in groups:
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            sums.append(-1.0)
            continue
        one = torch.tensor([float(rank)])
        dist.all_reduce(one, group=group)
        gathered = torch.empty(dist.get_world_size(group))
        dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=group)
        objects: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(objects, rank, group=group)
        dist.barrier(group)
        assert one.item() == gathered.sum() == sum(objects)
        sums.append(one.item())
    return sums


def test_groups_stay_and_work_over_several_lives(on_ranks) -> None:
    def on_rank(rank: int) -> list[list[float]]:
        # Overlapping groups: every rank is in three of them.
        groups = [None, *(dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3], [1, 2, 3]))]
        lives = [all_sums(groups, rank)]
        for _ in range(3):
            communicators.close_all(30.0)
            communicators.open_all()
            lives.append(all_sums(groups, rank))
        return lives

    expected = [[6.0, 1.0, -1, 2.0, -1, -1], [6, 1, -1, -1, 4, 6], [6, -1, 5, 2, -1, 6], [6, -1, 5, -1, 4, 6]]
    assert on_ranks(4, on_rank) == [[sums] * 4 for sums in expected]


def test_points_exchange_in_batches_before_and_after(on_ranks) -> None:
    def exchange(rank: int) -> float:
        received = torch.zeros(1)
        send = dist.P2POp(dist.isend, torch.tensor([rank + 5.0]), 1 - rank)
        receive = dist.P2POp(dist.irecv, received, 1 - rank)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()
        return received.item()

    def on_rank(rank: int) -> list[float]:
        first = exchange(rank)
        communicators.close_all(30.0)
        communicators.open_all()
        return [first, exchange(rank)]

    assert on_ranks(2, on_rank) == [[6.0, 6.0], [5.0, 5.0]]


def test_batches_of_points_reach_torch_with_its_own_kind_of_group(on_ranks) -> None:
    # In any other kind torch sends and receives one by one, which with NCCL waits for ever.
    def on_rank(rank: int) -> bool:
        operation = dist.P2POp(dist.isend, torch.zeros(1), 1 - rank)
        inner = communicators._with_inner_group(operation)
        same = (inner.op, inner.peer, inner.group_peer) == (operation.op, operation.peer, operation.group_peer)
        return same and inner.tensor is operation.tensor and type(inner.group) is dist.ProcessGroup

    assert on_ranks(2, on_rank) == [True, True]


def test_a_closed_group_says_what_to_do(on_ranks) -> None:
    def on_rank(rank: int) -> str:
        communicators.close_all(30.0)
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.zeros(1))
        communicators.open_all()
        return str(caught.value)

    assert "call wake()" in on_ranks(2, on_rank)[1]


def test_closing_alone_gives_up_in_time(on_ranks) -> None:
    def on_rank(rank: int) -> str:
        message = ""
        if rank == 0:
            with pytest.raises(TimeoutError) as caught:
                communicators.close_all(1.0)
            message = str(caught.value)
        dist.barrier()
        return message

    assert "only 1 of 2 ranks went to sleep within 1 s" in on_ranks(2, on_rank)[0]


def test_other_groups_are_left_alone(run_ranks: Callable[..., list[Any]]) -> None:
    def on_rank(rank: int) -> list[float]:
        communicators.close_all(30.0)
        sums = all_sums([None], rank)
        communicators.open_all()
        return sums

    assert run_ranks(2, on_rank) == [[1.0], [1.0]]


def test_a_closed_world_can_be_left(on_ranks) -> None:
    def on_rank(rank: int) -> int:
        dist.new_group([0, 1])
        communicators.close_all(30.0)
        dist.destroy_process_group()
        return len(communicators._groups)

    assert on_ranks(2, on_rank) == [0, 0]
