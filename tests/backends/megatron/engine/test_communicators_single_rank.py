"""Collectives of groups of one rank do what torch's own backend does in such a group."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dagrl.backends.megatron.engine import communicators

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def all_reduces(group: Any) -> list[Any]:
    mean, most = torch.tensor([1.0, 2.0]), torch.tensor([3])
    works = [dist.all_reduce(mean, SUM, group, async_op=True)]
    dist.all_reduce(most, MAX, group)
    return [works[0].wait(), mean, most]


def gathers(group: Any) -> list[Any]:
    flat, listed, objects = torch.zeros(4), [torch.zeros(2, 2)], [None]
    dist.all_gather_into_tensor(flat, torch.arange(4.0), group)
    dist.all_gather(listed, torch.ones(2, 2).t(), group)
    dist.all_gather_object(objects, {"a": 1}, group)
    to_one = [torch.zeros(1)]
    dist.gather(torch.tensor([5.0]), to_one, group_dst=0, group=group)
    return [flat, *listed, objects, *to_one]


def shares(group: Any) -> list[Any]:
    share, listed, whole = torch.zeros(3), torch.zeros(2), torch.arange(5.0)
    dist.reduce_scatter_tensor(share, torch.arange(3.0), group=group)
    dist.reduce_scatter(listed, [torch.tensor([7.0, 8.0])], group=group)
    # In place, as the gradients of a data-parallel group.
    dist.reduce_scatter_tensor(whole[0:5], whole, group=group)
    dist.all_gather_into_tensor(whole, whole[0:5], group)
    scattered = torch.zeros(2)
    dist.scatter(scattered, [torch.ones(2)], group_src=0, group=group)
    return [share, listed, whole, scattered]


def exchanges(group: Any) -> list[Any]:
    single, evenly = torch.zeros(4), torch.zeros(2, 2)
    dist.all_to_all_single(single, torch.arange(4.0), [4], [4], group=group)
    dist.all_to_all_single(evenly, torch.ones(2, 2), group=group)
    return [single, evenly]


def those_that_change_nothing(group: Any) -> list[Any]:
    tensor = torch.tensor([2.0])
    dist.broadcast(tensor, group_src=0, group=group)
    dist.reduce(tensor, group_dst=0, group=group)
    dist.barrier(group)
    return [tensor]


def several_at_once(group: Any) -> list[Any]:
    ones, twos, share = torch.ones(2), torch.full((2,), 2.0), torch.zeros(2)
    with dist._coalescing_manager(group):
        dist.all_reduce(ones, group=group)
        dist.all_reduce(twos, group=group)
    with dist._coalescing_manager(group, async_ops=True) as under_way:
        dist.all_gather_into_tensor(share, twos, group)
    under_way.wait()
    return [ones, twos, share]


@pytest.fixture(scope="module")
def groups() -> Any:
    """A group of one rank of dagrl's, and one of gloo's."""
    store = dist.HashStore()
    dist.init_process_group(communicators.reloadable("gloo"), store=store, rank=0, world_size=1)
    yield dist.group.WORLD, dist.new_group([0], backend="gloo")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "collectives", [all_reduces, gathers, shares, exchanges, those_that_change_nothing, several_at_once]
)
def test_alone_everything_is_as_in_torchs_own_group(groups: Any, collectives: Callable[[Any], list[Any]]) -> None:
    mine, torchs = groups
    assert type(mine) is communicators.SingleRankProcessGroup
    assert repr(collectives(mine)) == repr(collectives(torchs))


def test_collectives_of_nccl_that_gloo_lacks(groups: Any) -> None:
    stacked, listed = torch.zeros(1, 3), [torch.zeros(2)]
    dist.all_gather_into_tensor(stacked, torch.arange(3.0), groups[0])
    dist.all_to_all(listed, [torch.ones(2)], group=groups[0])
    assert (stacked.tolist(), listed[0].tolist()) == ([[0.0, 1.0, 2.0]], [1.0, 1.0])


@pytest.mark.parametrize("collective", [dist.all_reduce, dist.reduce_scatter_tensor, dist.reduce])
def test_a_sum_with_a_factor_is_refused_and_not_passed_over(groups: Any, collective: Callable[..., Any]) -> None:
    more = (torch.ones(1),) if collective is dist.reduce_scatter_tensor else ()
    where = {"group_dst": 0} if collective is dist.reduce else {}
    with pytest.raises(NotImplementedError, match="PREMUL_SUM"):
        collective(torch.ones(1), *more, op=dist._make_nccl_premul_sum(2.0), group=groups[0], **where)


def test_it_sleeps_and_wakes_with_the_others(groups: Any) -> None:
    communicators.close_all(5.0)
    assert all_reduces(groups[0])[1].tolist() == [1.0, 2.0]
    communicators.open_all()
    assert all_reduces(groups[0])[1].tolist() == [1.0, 2.0]
