"""An iterator in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from dagrl.workers.streaming import BackgroundIterator, HeartbeatLimiter

LONG_S = 60.0


def taken(items_of: BackgroundIterator[int]) -> list[list[int]]:
    found = []
    while (items := items_of.take(LONG_S)) is not None:
        found.append(items)
    return found


def test_items_come_in_order_and_all_that_are_ready_together() -> None:
    gate, done = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield 1
        gate.wait(LONG_S)
        yield 2
        yield 3
        done.set()

    items_of = BackgroundIterator(items())
    assert items_of.take(LONG_S) == [1]
    assert items_of.take(0.01) == [], "nothing has come"
    gate.set()
    done.wait(LONG_S)
    assert [item for each in taken(items_of) for item in each] == [2, 3]
    assert items_of.take(LONG_S) is None


def test_items_are_gathered_for_a_while() -> None:
    def items() -> Iterator[int]:
        time.sleep(0.02)
        yield from (1, 2, 3)

    items_of = BackgroundIterator(items())
    assert items_of.take(LONG_S, LONG_S) == [1, 2, 3], "waited for the first, and not beyond the last"
    assert items_of.take(LONG_S) is None


def test_an_empty_iterator_ends_at_once() -> None:
    assert taken(BackgroundIterator(iter(()))) == []


def test_a_failure_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    items_of = BackgroundIterator(items())
    assert items_of.take(LONG_S) == [1]
    with pytest.raises(ValueError, match="no more"):
        items_of.take(LONG_S)


def test_the_iterator_runs_in_another_thread() -> None:
    def items() -> Iterator[int]:
        for _ in range(3):
            yield threading.get_ident()

    idents = {ident for each in taken(BackgroundIterator(items())) for ident in each}
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_heartbeats_are_rate_limited() -> None:
    limiter = HeartbeatLimiter()
    assert limiter.next(lambda: 0) is None, "nothing was sampled yet"
    heartbeat = limiter.next(lambda: 5)
    assert heartbeat is not None and heartbeat.sampled_tokens == 5
    assert limiter.next(lambda: 9) is None, "a moment ago there was one"
    last = limiter.next(lambda: 9, last=True)
    assert last is not None and last.sampled_tokens == 9
    assert limiter.next(lambda: 9, last=True) is None
