"""The number of restarts in a run."""

from __future__ import annotations

import pytest

from dagrl.orchestrator.groups.worker_failures import RestartPolicy
from dagrl.scheduler.plan import WorkerId
from dagrl.workers.errors import WorkerDiedError, WorkerLostError


def died() -> WorkerLostError:
    failure = WorkerDiedError("the worker's process died", worker="actor/0 (host a, pid 1)", hint="out of memory?")
    failure.lost = (WorkerId("actor", 0),)
    return failure


def test_restarts_are_counted_and_reported_up_to_the_limit() -> None:
    restarts = RestartPolicy(2)
    restarts.has_run = True
    told = [restarts.use_restart(died(), "all go on") for _ in range(2)]
    assert told == [
        f"actor/0 (host a, pid 1) is lost: the worker's process died; all go on (restart {number} of 2)"
        for number in (1, 2)
    ]
    last = died()
    for what in ("the generator goes on", "all go on"):
        with pytest.raises(WorkerDiedError) as caught:
            restarts.use_restart(last, what)
        assert caught.value is last
    assert caught.value.cause == "the worker's process died"
    assert caught.value.hint == "this was after 2 restarts, as many as run.max_restarts allows; out of memory?"
    assert restarts.count == 2


@pytest.mark.parametrize(
    ("witness", "told"), [("actor/0 (host a, pid 1)", "actor/0 (host a, pid 1) cannot go on"), ("", "a worker is lost")]
)
def test_a_worker_that_lost_a_connection_is_not_reported_as_lost(witness, told) -> None:
    restarts = RestartPolicy(1)
    restarts.has_run = True
    failure = WorkerLostError("waited 5 s for 2 blocks", worker=witness)
    assert restarts.use_restart(failure, "all go on") == f"{told}: waited 5 s for 2 blocks; all go on (restart 1 of 1)"


def test_a_worker_that_never_started_is_not_restarted() -> None:
    restarts = RestartPolicy(3)
    with pytest.raises(WorkerDiedError) as caught:
        restarts.use_restart(died(), "all go on")
    assert (caught.value.hint, restarts.count) == ("out of memory?", 0)


def test_none_may_be_allowed() -> None:
    restarts = RestartPolicy(0)
    restarts.has_run = True
    with pytest.raises(WorkerDiedError, match="process died"):
        restarts.use_restart(died(), "all go on")
