"""What is told of a server's process that has died."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

from dagrl.backends.sglang.server import ServerProcess, last_words, telling_lines


def test_progress_bars_and_marks_do_not_hide_how_a_process_ended():
    log = (
        "[TP0] loading\n"
        "Multi-thread loading shards: 100% Completed | 1/1 [00:00<00:00, 300.32it/s]\n"
        "Capturing batches (bs=1):  50%|█████     | 1/2 [00:01<00:01]\r"
        "Capturing batches (bs=1): 100%|██████████| 2/2 [00:02<00:00]\n"
        "[saver] cudaError error: 2 (out of memory)\n"
        "    ^^^^^^~~~~\n"
    )
    assert telling_lines(log) == ["[TP0] loading", "[saver] cudaError error: 2 (out of memory)"]


def test_of_a_traceback_it_is_told_what_was_raised():
    log = (
        "Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/sglang/scheduler.py", line 493, in run_scheduler_process\n'
        "    scheduler = Scheduler(\n"
        "                ^^^^^^^^^^\n"
        '  File "/sglang/runner.py", line 8, in start\n'
        "    raise RuntimeError(\n"
        "        what)\n"
        "RuntimeError: Not enough memory.\n"
        "    Please try to increase --mem-fraction-static.\n"
    )
    assert telling_lines(log) == [
        "Scheduler hit an exception: Traceback (most recent call last):",
        "RuntimeError: Not enough memory.",
        "Please try to increase --mem-fraction-static.",
    ]


def test_last_words_are_those_of_the_newest_log_of_a_server_itself(tmp_path):
    prefix = tmp_path / "generator-1"
    assert last_words(prefix) == ""
    for age, name in enumerate(["generator-10-tp0", "generator-1-tp1", "generator-1-tp0", "generator-1-stacks"]):
        log = tmp_path / f"{name}.log"
        log.write_text(f"{name} has died\n")
        os.utime(log, (1000 - age, 1000 - age))
    assert last_words(prefix) == f"; its last output: generator-1-tp1 has died; the whole log is {prefix}-tp1.log"


def test_a_loop_without_tasks_of_its_own_is_stopped():
    loop = asyncio.new_event_loop()
    server = object.__new__(ServerProcess)
    server.engine = SimpleNamespace(loop=loop)
    winding_up = loop.create_task(server._wind_up())
    loop.call_later(5.0, loop.stop)
    loop.run_forever()
    loop.close()
    assert winding_up.done() and winding_up.exception() is None
