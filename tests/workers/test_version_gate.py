"""Who waits for weights, and until when."""

from __future__ import annotations

import threading
import time

import pytest

from dagrl.workers.version_gate import Arrivals


def never() -> bool:
    return False


def test_nobody_waits_for_what_is_there_and_nothing_is_no_sync() -> None:
    arrivals = Arrivals()
    assert arrivals.wait_for(0, 0.0, unless=never)
    assert not arrivals.wait_for(2, 0.01, unless=never)
    arrivals.arrived(3)
    assert arrivals.wait_for(2, 0.0, unless=never) and arrivals.wait_for(3, 0.0, unless=never)
    assert not arrivals.wait_for(4, 0.01, unless=never), "the weights of the sync before"


@pytest.mark.parametrize("comes", [True, False])
def test_whoever_waits_goes_on_at_once(comes: bool) -> None:
    arrivals, over = Arrivals(), threading.Event()

    def act() -> None:
        if comes:
            arrivals.arrived(1)
        else:
            over.set()
            arrivals.look_again()

    threading.Timer(0.05, act).start()
    begun = time.monotonic()
    assert arrivals.wait_for(1, 30.0, unless=over.is_set)
    assert time.monotonic() - begun < 10
