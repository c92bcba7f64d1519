"""Calls of user functions: what they raise, processes that they fork, and how a worker ends within one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dagrl.plugins.calls import UserFunctionError, call, recorded_call


def test_a_function_gets_its_arguments_and_its_result_comes_back() -> None:
    assert call(lambda first, *, second: (first, second), {"second": 2}, 1) == (1, 2)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, BaseException])
def test_whatever_it_raises_is_one_error_with_its_line(kind: type[BaseException]) -> None:
    def failing() -> None:
        raise kind("no")

    with pytest.raises(UserFunctionError, match=rf"raised {kind.__name__}: no \(.*test_calls\.py:\d+\)") as caught:
        call(failing, {})
    assert isinstance(caught.value.__cause__, kind)


def test_an_error_whose_message_fails_is_reported() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    def failing() -> None:
        raise MuteError

    with pytest.raises(UserFunctionError, match="raised MuteError: it has no message"):
        call(failing, {})


FORKING = {
    "returns": "os.fork()",
    "raises": "if os.fork() == 0: raise ValueError",
    "exits": "if os.fork() == 0: raise SystemExit(0)",
    "forks again": "os.fork(); os.fork(); os.fork()",
    "from a thread": "import threading\n    other = threading.Thread(target=os.fork); other.start(); other.join()",
    "has a terminal": "os.forkpty()",
}


@pytest.mark.parametrize("name", FORKING)
def test_a_forked_child_does_not_return_from_the_call(name: str) -> None:
    program = f"""
import os
from dagrl.plugins.calls import call
def forking():
    {FORKING[name]}
    return 1
call(forking, {{}})
os.write(1, b"returned\\n")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "returned\n"
    assert "forking has forked this process" in ended.stderr or name in ("from a thread", "has a terminal")


ENDING = {
    "exits": "os._exit(3)",
    "is killed": "os.kill(os.getpid(), 9)",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "aborts": "os.abort()",
    "ends by an alarm": "import signal, time; signal.alarm(1); time.sleep(60)",
}


@pytest.mark.parametrize("name", ENDING)
def test_a_call_that_ends_the_process_is_on_record(name: str, tmp_path: Path) -> None:
    program = f"""
import os, pathlib
from dagrl.plugins.calls import call, record_calls
record_calls(pathlib.Path({str(tmp_path / "new")!r}), "host")
print(os.getpid(), flush=True)
def fine(): pass
def ending():
    {ENDING[name]}
call(fine, {{}}, about="sample 1")
call(ending, {{}}, about="sample 2")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode
    assert recorded_call(tmp_path / "new", "host", int(ended.stdout)) == "__main__:ending, sample 2"


def test_no_call_is_on_record_between_calls_and_without_a_file(tmp_path: Path) -> None:
    program = f"""
import os, pathlib, threading
from dagrl.plugins.calls import FOLDER, call, record_calls
call(print, {{}}, os.getpid())
record_calls(pathlib.Path({str(tmp_path)!r}), "host")
held = threading.Barrier(6)
def ends(): held.wait(); held.wait()
threads = [threading.Thread(target=call, args=(ends, {{}}), kwargs=dict(about=f"sample {{n}}" * 100)) for n in range(5)]
for each in threads: each.start()
held.wait()
(file,) = pathlib.Path({str(tmp_path)!r}, FOLDER).iterdir()
print(file.stat().st_size)
held.wait()
for each in threads: each.join()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    pid, size = map(int, ended.stdout.split())
    assert size == 1024
    assert recorded_call(tmp_path, "host", pid) == recorded_call(tmp_path, "host", pid + 1) == ""


CALLERS = {
    "a tool": """
import dagrl
from dagrl.plugins.tool import Tool
@dagrl.tool
def forks(text: str) -> str:
    "Forks."
    os.fork()
    return text
Tool(forks, {}).call({"text": "x"}, {})
""",
    "an async tool": """
import dagrl
from dagrl.plugins.tool import Tool
@dagrl.tool
async def forks(text: str) -> str:
    "Forks."
    os.fork()
    return text
Tool(forks, {}).call({"text": "x"}, {})
""",
    "an environment": """
import dagrl
from dagrl.plugins.environment import EnvironmentClass
from dagrl.ops.turns.dialogue import Episode
class Forks:
    def reset(self): pass
    def step(self, response):
        os.fork()
        return dagrl.Observation("x")
Episode(EnvironmentClass("m:Forks", Forks, {}, ()), {}).step("x", last=False)
""",
    "a tracker": """
import sys, types
from dagrl.tracking.background_tracker import OwnTracker
class Forks:
    def start(self, run_dir, config, resumed_step): pass
    def log(self, step, metrics): os.fork()
    def close(self, ok): pass
sys.modules["trackers"] = types.ModuleType("trackers")
sys.modules["trackers"].Forks = Forks
OwnTracker("trackers:Forks", {}, None).log(1, {})
""",
    "an agent's function": """
import asyncio
from dagrl.ops.agents.functions import FunctionProgram
async def forks(client, row):
    os.fork()
asyncio.run(FunctionProgram(forks, {}).run("http://127.0.0.1:1/v1", "key", {}))
""",
}


@pytest.mark.parametrize("name", CALLERS)
def test_every_caller_ends_forked_children(name: str) -> None:
    program = f'import os\n{CALLERS[name]}\nos.write(1, b"returned\\n")\nos._exit(0)'
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "returned\n", ended.stderr
    assert "has forked this process" in ended.stderr
