"""Work in threads: at most a given number at a time, without waiting for those that take too long."""

from __future__ import annotations

import queue
import threading

import pytest

from dagrl.ops.turns.jobs import JobResult, Jobs, JobTimeoutError


class Bench:
    """Jobs, and the ends that they have delivered."""

    def __init__(self, max_running: int = 2, timeout_s: float = 60.0) -> None:
        self.ended: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self.jobs = Jobs(self.ended.put, max_running=max_running, timeout_s=timeout_s)

    def next(self) -> JobResult:
        done = self.ended.get(timeout=120)
        assert self.jobs.settle(done)
        return done


def test_work_ends_with_its_result_or_with_what_it_raised() -> None:
    bench = Bench()

    def fail() -> None:
        raise KeyError("nothing here")

    right, wrong = bench.jobs.begin(lambda: 7), bench.jobs.begin(fail)
    ends = {done.job: done for done in (bench.next(), bench.next())}
    assert (ends[right].result, ends[right].failure) == (7, None)
    assert isinstance(ends[wrong].failure, KeyError)


def test_an_exit_in_the_work_is_a_failure_of_the_work() -> None:
    bench = Bench()

    def leave() -> None:
        raise SystemExit(3)

    bench.jobs.begin(leave)
    assert isinstance(bench.next().failure, SystemExit)


def test_no_more_run_at_once_than_may() -> None:
    bench, gate, under_way, most = Bench(max_running=3), threading.Semaphore(0), [], []
    lock = threading.Lock()

    def work() -> None:
        with lock:
            under_way.append(1)
            most.append(len(under_way))
        gate.acquire()
        with lock:
            under_way.pop()

    for _ in range(10):
        bench.jobs.begin(work)
    for _ in range(10):
        gate.release()
        bench.next()
    assert max(most) == 3


def test_a_timed_out_call_ends_frees_its_slot_and_is_ignored() -> None:
    bench, gate = Bench(max_running=1, timeout_s=0.05), threading.Event()
    slow = bench.jobs.begin(gate.wait)
    after = bench.jobs.begin(lambda: "after")
    assert bench.jobs.late() == []
    with pytest.raises(queue.Empty):
        bench.ended.get(timeout=bench.jobs.left_s())
    (late,) = bench.jobs.late()
    assert late.job == slow
    assert isinstance(late.failure, JobTimeoutError)
    assert str(late.failure) == "no answer within 0.05 s"
    assert bench.jobs.settle(late)
    done = bench.next()
    assert (done.job, done.result) == (after, "after")
    gate.set()
    assert not bench.jobs.settle(bench.ended.get(timeout=120)), "it came too late"
    assert bench.jobs.left_s() is None
