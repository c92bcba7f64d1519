"""An iterator in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from dagrl.workers.background_iterator import Pump
from dagrl.workers.heartbeat import Pulse

LONG_S = 60.0


def taken(pump: Pump[int]) -> list[list[int]]:
    found = []
    while (items := pump.take(LONG_S)) is not None:
        found.append(items)
    return found


def test_items_come_in_order_and_what_has_come_comes_together() -> None:
    gate, done = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield 1
        gate.wait(LONG_S)
        yield 2
        yield 3
        done.set()

    pump = Pump(items())
    assert pump.take(LONG_S) == [1]
    assert pump.take(0.01) == [], "nothing has come"
    gate.set()
    done.wait(LONG_S)
    assert [item for each in taken(pump) for item in each] == [2, 3]
    assert pump.take(LONG_S) is None


def test_what_comes_within_a_while_behind_the_first_comes_with_it() -> None:
    def items() -> Iterator[int]:
        time.sleep(0.02)
        yield from (1, 2, 3)

    pump = Pump(items())
    assert pump.take(LONG_S, LONG_S) == [1, 2, 3], "waited for the first, and not beyond the last"
    assert pump.take(LONG_S) is None


def test_an_empty_iterator_ends_at_once() -> None:
    assert taken(Pump(iter(()))) == []


def test_a_failure_comes_after_what_was_made_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    pump = Pump(items())
    assert pump.take(LONG_S) == [1]
    with pytest.raises(ValueError, match="no more"):
        pump.take(LONG_S)


def test_the_iterator_runs_in_one_other_thread() -> None:
    def items() -> Iterator[int]:
        for _ in range(3):
            yield threading.get_ident()

    idents = {ident for each in taken(Pump(items())) for ident in each}
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_a_pulse_tells_news_and_not_too_often() -> None:
    pulse = Pulse()
    assert pulse.beat(lambda: 0) is None, "nothing was sampled yet"
    beat = pulse.beat(lambda: 5)
    assert beat is not None and beat.sampled_tokens == 5
    assert pulse.beat(lambda: 9) is None, "a moment ago there was one"
    last = pulse.beat(lambda: 9, last=True)
    assert last is not None and last.sampled_tokens == 9
    assert pulse.beat(lambda: 9, last=True) is None
