"""Load balancing: each prompt goes once to the server with the fewest open ones, at any speed of the servers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.backends.base import RequestLimits
from dagrl.orchestrator.groups.load_balancer import (
    MAX_OPEN_CHUNKS,
    LoadBalancer,
    agent_limits,
    chunk_limits,
    gather_seconds,
)


class Table:
    """Servers that finish groups at random times."""

    def __init__(self, groups: int, servers: int, size: RequestLimits, pinned: Mapping[int, int] | None = None) -> None:
        self.balancer = LoadBalancer(range(groups), servers, size, pinned)
        self.chunks: list[deque[list[int]]] = [deque() for _ in range(servers)]
        """The chunks of each server, with their unfinished groups."""
        self.sent: list[tuple[int, tuple[int, ...]]] = []
        self.finished: list[int] = []
        self.send()

    def send(self) -> None:
        while handed := list(self.balancer.next_chunks()):
            self.sent += handed
            for server, chunk in handed:
                self.chunks[server].append(list(chunk))
                self.balancer.started(server)

    def finish(self, server: int, which: int) -> None:
        """A server finishes one group of one of its chunks, and tells when that was the last."""
        if chunks := self.chunks[server]:
            chunk = chunks[which % len(chunks)]
            self.finished.append(chunk.pop(which % len(chunk)))
            self.balancer.finished(server, 1)
            if not chunk:
                chunks.remove(chunk)
                self.balancer.end_chunk(server, 0)
            self.send()

    def inflight(self) -> list[int]:
        return [sum(map(len, chunks)) for chunks in self.chunks]


sizes = st.builds(lambda chunk, more: RequestLimits(chunk, chunk + more), st.integers(1, 6), st.integers(0, 8))


@given(
    groups=st.integers(0, 40),
    servers=st.integers(1, 5),
    size=sizes,
    luck=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 50)), max_size=80),
)
def test_every_group_is_sent_once_in_the_same_chunks_whatever_the_servers_speed(groups, servers, size, luck) -> None:
    table = Table(groups, servers, size)
    for server, which in luck:
        table.finish(server % servers, which)
        assert max(table.inflight()) <= size.max_inflight
    while any(table.inflight()):
        for server in range(servers):
            table.finish(server, 0)
    chunks = [chunk for _, chunk in table.sent]
    assert [group for chunk in chunks for group in chunk] == list(range(groups)), "in order, each once"
    assert all(len(chunk) == size.chunk for chunk in chunks[:-1])
    assert sorted(table.finished) == list(range(groups)), "lost"


@given(groups=st.integers(1, 60), servers=st.integers(1, 6), size=sizes)
def test_all_servers_start_with_the_same_load(groups, servers, size) -> None:
    inflight = Table(groups, servers, size).inflight()
    assert max(inflight) - min(inflight) <= size.chunk


def test_the_next_chunk_goes_to_the_server_that_has_finished_one() -> None:
    table = Table(10, 2, RequestLimits(2, 4))
    assert table.sent == [(0, (0, 1)), (1, (2, 3)), (0, (4, 5)), (1, (6, 7))]
    table.finish(1, 0)
    assert len(table.sent) == 4, "one group of two makes no room for two"
    table.finish(1, 0)
    assert table.sent[4:] == [(1, (8, 9))]


def test_an_idle_server_gets_a_chunk_of_any_size() -> None:
    assert [server for server, _ in Table(6, 2, RequestLimits(3, 3)).sent] == [0, 1]


def test_the_number_of_open_chunks_is_limited() -> None:
    table = Table(3 * MAX_OPEN_CHUNKS, 1, RequestLimits(1, 1000))
    assert len(table.sent) == MAX_OPEN_CHUNKS
    table.finish(0, 5)
    assert len(table.sent) == MAX_OPEN_CHUNKS + 1


def test_a_server_gets_the_next_chunk_after_it_has_started_the_last() -> None:
    balancer = LoadBalancer(range(6), 2, RequestLimits(1, 9))
    assert list(balancer.next_chunks()) == [(0, (0,)), (1, (1,))]
    assert list(balancer.next_chunks()) == []
    balancer.started(1)
    assert list(balancer.next_chunks()) == [(1, (2,))]
    # An aborted server ends its chunk without starting it.
    balancer.end_chunk(0, 1)
    assert list(balancer.next_chunks()) == [(0, (3,))]


def test_aborted_groups_are_not_in_flight_and_nothing_is_sent_after_a_stop() -> None:
    balancer = LoadBalancer(range(6), 1, RequestLimits(2, 2))
    assert [chunk for _, chunk in balancer.next_chunks()] == [(0, 1)]
    balancer.end_chunk(0, 2)
    assert [chunk for _, chunk in balancer.next_chunks()] == [(2, 3)]
    balancer.stop()
    balancer.end_chunk(0, 2)
    assert list(balancer.next_chunks()) == []


@pytest.mark.parametrize(
    ("limits", "groups", "group_size", "servers", "expected"),
    [
        (RequestLimits(512, 1024), 32, 32, 1, RequestLimits(16, 32)),
        (RequestLimits(512, 1024), 8, 4, 1, RequestLimits(8, 256)),
        (RequestLimits(512, 1024), 9, 4, 2, RequestLimits(5, 256)),
        (RequestLimits(4, 8), 8, 4, 1, RequestLimits(1, 2)),
        # Fewer than the samples of one prompt.
        (RequestLimits(4, 8), 8, 16, 2, RequestLimits(1, 1)),
    ],
)
def test_chunk_limits_follow_the_request_limits_and_the_even_share(
    limits, groups, group_size, servers, expected
) -> None:
    assert chunk_limits(limits, groups, group_size, servers) == expected


def test_a_chunk_is_never_larger_than_an_even_share() -> None:
    table = Table(16, 4, chunk_limits(RequestLimits(1000, 2000), 16, 2, 4))
    assert Counter(server for server, _ in table.sent) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert table.inflight() == [4, 4, 4, 4]


@given(st.integers(1, 4096))
def test_gathering_bounds_the_message_rate_and_takes_at_most_a_second(
    servers,
) -> None:
    assert gather_seconds(servers) == min(1.0, max(0.05, servers / 200))
    assert gather_seconds(servers) <= gather_seconds(servers + 1)


@pytest.mark.parametrize(("running", "chunk"), [(4, 4), (64, 32), (2000, 250)])
def test_agents_are_bounded_by_their_own_number_and_not_by_the_engines(running, chunk) -> None:
    limits = agent_limits(running, RequestLimits(chunk=32, max_inflight=40))
    assert limits == RequestLimits(chunk, running + -(-running // 4))
    assert -(-limits.max_inflight // limits.chunk) < MAX_OPEN_CHUNKS, "a worker has no threads for more"


@given(
    groups=st.integers(1, 30),
    servers=st.integers(1, 4),
    size=sizes,
    pins=st.dictionaries(st.integers(0, 29), st.integers(0, 3)),
)
def test_a_pinned_group_is_only_sent_to_its_server(groups, servers, size, pins) -> None:
    pinned = {group: server % servers for group, server in pins.items() if group < groups}
    table = Table(groups, servers, size, pinned)
    while any(table.inflight()):
        assert max(table.inflight()) <= size.max_inflight
        for server in range(servers):
            table.finish(server, 0)
    assert sorted(table.finished) == list(range(groups))
    sent = {group: server for server, chunk in table.sent for group in chunk}
    assert pinned.items() <= sent.items()
