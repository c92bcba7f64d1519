"""Dealing prompts to servers: each of them once, to whoever has least in hand, however fast the servers are."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.backends.base import RequestLimits
from dagrl.workers.groups.load_balancer import MAX_OPEN_CHUNKS, ChunkLimits, LoadBalancer, chunk_limits, gather_seconds


class Table:
    """Servers that finish groups when chance says so."""

    def __init__(self, groups: int, servers: int, size: ChunkLimits) -> None:
        self.balancer = LoadBalancer(range(groups), servers, size)
        self.hands: list[deque[list[int]]] = [deque() for _ in range(servers)]
        """Of each server, its portions, with the groups that it has not finished."""
        self.dealt: list[tuple[int, tuple[int, ...]]] = []
        self.finished: list[int] = []
        self.deal()

    def deal(self) -> None:
        while handed := list(self.balancer.next_chunks()):
            self.dealt += handed
            for server, portion in handed:
                self.hands[server].append(list(portion))
                self.balancer.started(server)

    def finish(self, server: int, which: int) -> None:
        """A server finishes one group of one of its portions, and tells when that was the last."""
        if portions := self.hands[server]:
            portion = portions[which % len(portions)]
            self.finished.append(portion.pop(which % len(portion)))
            self.balancer.finished(server, 1)
            if not portion:
                portions.remove(portion)
                self.balancer.end_chunk(server, 0)
            self.deal()

    def in_hand(self) -> list[int]:
        return [sum(map(len, portions)) for portions in self.hands]


sizes = st.builds(lambda portion, more: ChunkLimits(portion, portion + more), st.integers(1, 6), st.integers(0, 8))


@given(
    groups=st.integers(0, 40),
    servers=st.integers(1, 5),
    size=sizes,
    luck=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 50)), max_size=80),
)
def test_every_group_is_dealt_once_in_the_same_portions_whoever_is_faster(groups, servers, size, luck) -> None:
    table = Table(groups, servers, size)
    for server, which in luck:
        table.finish(server % servers, which)
        assert max(table.in_hand()) <= size.max_inflight
    while any(table.in_hand()):
        for server in range(servers):
            table.finish(server, 0)
    portions = [portion for _, portion in table.dealt]
    assert [group for portion in portions for group in portion] == list(range(groups)), "in order, each once"
    assert all(len(portion) == size.chunk for portion in portions[:-1])
    assert sorted(table.finished) == list(range(groups)), "lost"


@given(groups=st.integers(1, 60), servers=st.integers(1, 6), size=sizes)
def test_at_first_all_get_the_same(groups, servers, size) -> None:
    in_hand = Table(groups, servers, size).in_hand()
    assert max(in_hand) - min(in_hand) <= size.chunk


def test_the_next_portion_goes_to_whoever_has_finished_one() -> None:
    table = Table(10, 2, ChunkLimits(2, 4))
    assert table.dealt == [(0, (0, 1)), (1, (2, 3)), (0, (4, 5)), (1, (6, 7))]
    table.finish(1, 0)
    assert len(table.dealt) == 4, "one group of two makes no room for two"
    table.finish(1, 0)
    assert table.dealt[4:] == [(1, (8, 9))]


def test_a_server_that_has_nothing_gets_a_portion_however_large() -> None:
    assert [server for server, _ in Table(6, 2, ChunkLimits(3, 3)).dealt] == [0, 1]


def test_a_server_has_only_so_many_portions_at_once() -> None:
    table = Table(3 * MAX_OPEN_CHUNKS, 1, ChunkLimits(1, 1000))
    assert len(table.dealt) == MAX_OPEN_CHUNKS
    table.finish(0, 5)
    assert len(table.dealt) == MAX_OPEN_CHUNKS + 1


def test_a_server_gets_the_next_portion_only_when_it_has_begun_with_the_last() -> None:
    balancer = LoadBalancer(range(6), 2, ChunkLimits(1, 9))
    assert list(balancer.next_chunks()) == [(0, (0,)), (1, (1,))]
    assert list(balancer.next_chunks()) == []
    balancer.started(1)
    assert list(balancer.next_chunks()) == [(1, (2,))]
    # One that was told to stop is through with its portion without having begun.
    balancer.end_chunk(0, 1)
    assert list(balancer.next_chunks()) == [(0, (3,))]


def test_what_a_server_gives_up_is_no_longer_in_its_hand_and_after_a_stop_nothing_is_dealt() -> None:
    balancer = LoadBalancer(range(6), 1, ChunkLimits(2, 2))
    assert [portion for _, portion in balancer.next_chunks()] == [(0, 1)]
    balancer.end_chunk(0, 2)
    assert [portion for _, portion in balancer.next_chunks()] == [(2, 3)]
    balancer.stop()
    balancer.end_chunk(0, 2)
    assert list(balancer.next_chunks()) == []


@pytest.mark.parametrize(
    ("limits", "groups", "group_size", "servers", "expected"),
    [
        (RequestLimits(512, 1024), 32, 32, 1, ChunkLimits(16, 32)),
        (RequestLimits(512, 1024), 8, 4, 1, ChunkLimits(8, 256)),
        (RequestLimits(512, 1024), 9, 4, 2, ChunkLimits(5, 256)),
        (RequestLimits(4, 8), 8, 4, 1, ChunkLimits(1, 2)),
        # Fewer than the samples of one prompt.
        (RequestLimits(4, 8), 8, 16, 2, ChunkLimits(1, 1)),
    ],
)
def test_helpings_follow_the_appetite_and_leave_something_for_the_others(
    limits, groups, group_size, servers, expected
) -> None:
    assert chunk_limits(limits, groups, group_size, servers) == expected


def test_a_helping_is_never_more_than_an_even_share() -> None:
    table = Table(16, 4, chunk_limits(RequestLimits(1000, 2000), 16, 2, 4))
    assert Counter(server for server, _ in table.dealt) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert table.in_hand() == [4, 4, 4, 4]


@given(st.integers(1, 4096))
def test_messages_come_no_faster_than_the_driver_can_take_them_and_no_shard_is_late_by_more_than_a_second(
    servers,
) -> None:
    assert gather_seconds(servers) == min(1.0, max(0.05, servers / 200))
    assert gather_seconds(servers) <= gather_seconds(servers + 1)
