"""The first cause of a failure, in logs of several processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dagrl.backends.serving.server_logs import ServerLogs

TAKEN = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    "port: 45123, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)
VLLM = f"""\
(Worker pid=83) WARNING 11-27 17:13:56 [cpu_worker.py:127] libiomp is not found in LD_PRELOAD.
(Worker pid=83) INFO 11-27 17:13:56 [parallel_state.py:1615] world_size=1 rank=0 local_rank=0
(Worker pid=83) ERROR 11-27 17:13:56 [multiproc_executor.py:901] WorkerProc failed to start.
(Worker pid=83) ERROR 11-27 17:13:56 [multiproc_executor.py:901] Traceback (most recent call last):
(Worker pid=83) ERROR 11-27 17:13:56 [multiproc_executor.py:901]   File "/vllm/executor.py", line 868, in worker_main
(Worker pid=83) ERROR 11-27 17:13:56 [multiproc_executor.py:901]     worker = WorkerProc(*args, **kwargs)
(Worker pid=83) ERROR 11-27 17:13:56 [multiproc_executor.py:901]              ^^^^^^^^^^^^^^^^^^^^^^^^^^^
(Worker pid=83) ERROR 11-27 17:13:56 [multiproc_executor.py:901]   File "/torch/rendezvous.py", line 199, in _create
(EngineCore pid=75) INFO 11-27 17:13:56 [multiproc_executor.py:429] [shutdown] Executor: waiting for worker exit count=1
(Worker pid=83) ERROR 11-27 17:13:56 [multiproc_executor.py:901]     return TCPStore(
(Worker pid=83) ERROR 11-27 17:13:56 [multiproc_executor.py:901]            ^^^^^^^^^
(Worker pid=83) ERROR 11-27 17:13:56 [multiproc_executor.py:901] {TAKEN}
(EngineCore pid=75) ERROR 11-27 17:13:58 [core.py:1330] EngineCore failed to start.
(EngineCore pid=75) ERROR 11-27 17:13:58 [core.py:1330] Traceback (most recent call last):
(EngineCore pid=75) ERROR 11-27 17:13:58 [core.py:1330]   File "/vllm/executor.py", line 765, in wait_for_ready
(EngineCore pid=75) ERROR 11-27 17:13:58 [core.py:1330]     raise e from None
(EngineCore pid=75) ERROR 11-27 17:13:58 [core.py:1330] Exception: WorkerProc initialization failed due to an exception
(EngineCore pid=75) Process EngineCore:
(EngineCore pid=75) Traceback (most recent call last):
(EngineCore pid=75)   File "/python3.12/multiprocessing/process.py", line 314, in _bootstrap
(EngineCore pid=75)     self.run()
(EngineCore pid=75) Exception: WorkerProc initialization failed due to an exception
"""
NO_ROOM = """\
[2026-11-27 17:13:56 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/sglang/scheduler.py", line 493, in run_scheduler_process
    scheduler = Scheduler(
                ^^^^^^^^^^
  File "/sglang/runner.py", line 8, in start
    raise RuntimeError(
        what)
RuntimeError: Not enough memory.
    Please try to increase --mem-fraction-static.
"""
CHAINED = """\
Traceback (most recent call last):
  File "/sglang/runner.py", line 8, in start
    return sizes[name]
  [Previous line repeated 3 more times]
KeyError: 'name'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/sglang/runner.py", line 10, in start
    raise ValueError("no size")
ValueError: no size
"""
HANDLED = """\
(Worker pid=83) WARNING 11-27 17:13:56 [utils.py:7] cannot read the cache
(Worker pid=83) WARNING 11-27 17:13:56 [utils.py:7] Traceback (most recent call last):
(Worker pid=83) WARNING 11-27 17:13:56 [utils.py:7]   File "/vllm/utils.py", line 3, in read
(Worker pid=83) WARNING 11-27 17:13:56 [utils.py:7]     open(file)
(Worker pid=83) WARNING 11-27 17:13:56 [utils.py:7] FileNotFoundError: no such file
"""
BARS = (
    "[TP0] loading\n"
    "Multi-thread loading shards: 100% Completed | 1/1 [00:00<00:00, 300.32it/s]\n"
    "Capturing batches (bs=1):  50%|█████     | 1/2 [00:01<00:01]\r"
    "Capturing batches (bs=1): 100%|██████████| 2/2 [00:02<00:00]\n"
    "[saver] cudaError error: 2 (out of memory)\n"
    "    ^^^^^^~~~~\n"
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (VLLM, f"first error: {TAKEN}"),
        (NO_ROOM, "first error: RuntimeError: Not enough memory. | Please try to increase --mem-fraction-static."),
        (CHAINED, "first error: KeyError: 'name' | ValueError: no size"),
        (HANDLED + VLLM, f"first error: {TAKEN}"),
        (HANDLED, "last output: cannot read the cache | FileNotFoundError: no such file"),
        (BARS, "last output: [TP0] loading | [saver] cudaError error: 2 (out of memory)"),
        ("one\ntwo\ntwo\nthree\nfour\nfive\n", "last output: two | three | four | five"),
    ],
)
def test_the_first_cause_is_reported_without_frames_and_prefixes(text, told, tmp_path) -> None:
    logs = ServerLogs(tmp_path, "generator-0.log")
    (tmp_path / "generator-0.log").write_text(text)
    assert logs.failure_text() == f"; its {told}; the whole log is {tmp_path}/generator-0.log"


def write(log: Path, text: str, age: int) -> None:
    log.write_text(text)
    os.utime(log, (1000 - age, 1000 - age))


def test_the_log_of_the_process_that_failed_first_is_read_and_else_the_newest(tmp_path) -> None:
    logs = ServerLogs(tmp_path, "generator-1-*tp*.log")
    assert logs.failure_text() == ""
    for age, name in enumerate(["generator-10-tp0", "generator-1-stacks", "generator-1-tp1", "generator-1-tp0"]):
        write(tmp_path / f"{name}.log", f"{name} has died\n", age)
    assert "its last output: generator-1-tp1 has died; the whole log" in logs.failure_text()
    write(tmp_path / "generator-1-tp1.log", CHAINED, 1)
    write(tmp_path / "generator-1-tp2.log", NO_ROOM, 2)
    assert "its first error: RuntimeError: Not enough memory." in logs.failure_text()


def test_the_output_of_an_earlier_server_is_left_out(tmp_path) -> None:
    log = tmp_path / "generator-0.log"
    log.write_text(VLLM)
    logs = ServerLogs(tmp_path, "generator-0.log")
    assert logs.failure_text() == f"; the whole log is {log}"
    with log.open("a") as file:
        file.write(CHAINED)
    assert "its first error: KeyError: 'name'" in logs.failure_text()
