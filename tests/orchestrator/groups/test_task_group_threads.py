"""Calls in a thread of their own: their end, and that an endless one blocks nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from dagrl.orchestrator.groups.task_group import run_in_daemon_thread


def test_it_returns_the_result_of_another_thread() -> None:
    def where(number: int) -> tuple[int, int]:
        return number + 1, threading.get_ident()

    number, thread = asyncio.run(run_in_daemon_thread(where, 2))
    assert number == 3
    assert thread != threading.get_ident()


def test_it_raises_the_exception_of_the_function() -> None:
    def fails() -> None:
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        asyncio.run(run_in_daemon_thread(fails))


def test_neither_loop_nor_process_waits_for_one_that_does_not_return() -> None:
    program = (
        "import asyncio, time\n"
        "from dagrl.orchestrator.groups.task_group import run_in_daemon_thread\n"
        "async def main():\n"
        "    try:\n"
        "        await asyncio.wait_for(run_in_daemon_thread(time.sleep, 600), 0.05)\n"
        "    except TimeoutError:\n"
        "        print('late')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "late\n", "")


def test_an_unexpected_answer_is_dropped() -> None:
    gate, told = threading.Event(), threading.Event()

    def slow() -> None:
        gate.wait(30)
        told.set()

    async def impatient() -> None:
        waiting = asyncio.ensure_future(run_in_daemon_thread(slow))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        gate.set()
        while not told.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)

    asyncio.run(impatient())
