"""Who waits for weights, and until when."""

from __future__ import annotations

import threading
import time

import pytest

from dagrl.workers.streaming import WeightVersionGate


def never() -> bool:
    return False


def test_the_gate_is_open_for_weights_that_have_arrived() -> None:
    gate = WeightVersionGate()
    assert gate.wait_for(0, 0.0, unless=never)
    assert not gate.wait_for(2, 0.01, unless=never)
    gate.open(3)
    assert gate.wait_for(2, 0.0, unless=never) and gate.wait_for(3, 0.0, unless=never)
    assert not gate.wait_for(4, 0.01, unless=never), "the weights of the sync before"


@pytest.mark.parametrize("comes", [True, False])
def test_a_waiting_thread_continues_at_once(comes: bool) -> None:
    gate, over = WeightVersionGate(), threading.Event()

    def act() -> None:
        if comes:
            gate.open(1)
        else:
            over.set()
            gate.recheck()

    threading.Timer(0.05, act).start()
    begun = time.monotonic()
    assert gate.wait_for(1, 30.0, unless=over.is_set)
    assert time.monotonic() - begun < 10
