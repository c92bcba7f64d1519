"""Who of the host's workers takes what comes."""

from __future__ import annotations

import pytest

from dagrl.orchestrator.groups.worker_group import CpuWorkerPool
from dagrl.orchestrator.groups.worker_handle import Timeout, WorkerHandle
from dagrl.scheduler.plan import WorkerId

HOSTS = [WorkerHandle(WorkerId("host", rank), None, Timeout(1.0, "node_timeout_s")) for rank in range(3)]


def test_the_last_reader_reads_again() -> None:
    idle = CpuWorkerPool(HOSTS)
    reader = idle.take(reads=True)
    idle.give_back(reader)
    others = [idle.take(reads=False), idle.take(reads=False)]
    assert reader not in others, "it is kept for the prompts while another is idle"
    for other in others:
        idle.give_back(other)
    assert idle.take(reads=True) is reader


def test_the_reader_takes_other_tasks_if_no_other_worker_is_idle() -> None:
    idle = CpuWorkerPool(HOSTS)
    reader = idle.take(reads=True)
    idle.give_back(reader)
    assert {idle.take(reads=False).id for _ in HOSTS} == {host.id for host in HOSTS}


def test_if_the_reader_is_busy_another_worker_becomes_the_reader() -> None:
    idle = CpuWorkerPool(HOSTS)
    first, second = idle.take(reads=True), idle.take(reads=True)
    assert first is not second
    for host in (second, first):
        idle.give_back(host)
    assert idle.take(reads=True) is second


@pytest.mark.parametrize("reads", [True, False])
def test_each_worker_is_taken_once(reads: bool) -> None:
    idle = CpuWorkerPool(HOSTS)
    assert len({idle.take(reads=reads).id for _ in HOSTS}) == len(HOSTS)
