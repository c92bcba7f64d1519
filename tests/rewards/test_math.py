"""The math reward: its process, and the bound on its time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dagrl.rewards.math import _Checker, math_reward

ENDLESS = r"\boxed{9^{9^{9^{9}}}}"


@pytest.fixture(scope="module")
def checker() -> Iterator[_Checker]:
    checker = _Checker()
    yield checker
    checker.close()


def test_an_answer_is_compared_with_the_reference() -> None:
    assert [math_reward(r"\boxed{3 1/2}", answer) for answer in ("3.5", "1.5")] == [1.0, 0.0]


def test_a_strict_reward_requires_a_number_that_is_not_cut() -> None:
    responses = ["#### 18", "#### 9+9"]
    assert [math_reward(each, "18") for each in responses] == [1.0, 1.0]
    assert [math_reward(each, "18", strict=True) for each in responses] == [1.0, 0.0]
    assert [math_reward("#### 18", "18", "length", strict=strict) for strict in (False, True)] == [1.0, 0.0]


def test_no_response_is_right_where_the_reference_is_empty() -> None:
    with pytest.warns(
        UserWarning, match=r"'\\\\boxed\{\}' contains nothing to compare with: its responses get a reward of 0"
    ):
        assert math_reward(r"\boxed{}", r"\boxed{}") == 0.0


def test_a_bound_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout_s of the math reward must be above 0"):
        math_reward("18", "18", timeout_s=0)


def test_the_bound_holds_in_any_thread_and_work_continues() -> None:
    def one_after_another() -> tuple[float, float, float]:
        return (math_reward("18", "18"), math_reward(ENDLESS, "18", timeout_s=0.5), math_reward("17", "17"))

    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(2) as threads:
        begin = time.monotonic()
        results = [future.result() for future in [threads.submit(one_after_another) for _ in range(2)]]
        seconds = time.monotonic() - begin
    assert results == [(1.0, 0.0, 1.0)] * 2
    # Two starts of a process that loads sympy, and two bounds; a machine with other work takes its time for that.
    assert seconds < 60


def test_concurrent_callers_do_not_get_each_others_replies() -> None:
    with ThreadPoolExecutor(2) as threads:
        rewards = list(threads.map(lambda n: math_reward(f"\\boxed{{{n}}}", str(n - n % 2)), range(60)))
    assert rewards == [1.0, 0.0] * 30


def test_line_breaks_and_odd_characters_reach_the_checker() -> None:
    assert math_reward("π ≈ 3\u2028\n\x00\r\n é\ud800 \n#### 18\n", "18") == 1.0


def test_nothing_stays_behind_when_the_caller_is_killed() -> None:
    caller = (
        "import threading, time\n"
        "from dagrl.rewards import math\n"
        "math.math_reward('1', '1')\n"
        "print(math._CHECKERS._idle[0].pid, flush=True)\n"
        rf"math.math_reward(r'{ENDLESS}', '1', timeout_s=1)"
    )
    process = subprocess.Popen([sys.executable, "-c", caller], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    checker = int(process.stdout.readline())
    processes = [checker, _child_of(checker)]
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 30
    while any(map(_runs, processes)):
        assert time.monotonic() < deadline, "the checker outlived its caller"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_after_a_timeout_the_next_answer_costs_little(checker: _Checker) -> None:
    def ask(response: str) -> dict[str, object]:
        return checker.ask({"response": response, "answer": "18", "cpu_seconds": 0.2})

    assert ask(r"\boxed{9+9}") == {"matches": True}
    for _ in range(3):
        before, child = _cpu_seconds(checker.pid), _child_of(checker.pid)
        assert ask(ENDLESS) == {"matches": False}
        assert ask(r"\boxed{9+9}") == {"matches": True}
        assert _child_of(checker.pid) != child
        spent = _cpu_seconds(checker.pid) - before
        # The child that was ended had 0.2 s.
        assert spent < 0.2 + 0.5
    assert checker.alive


def test_brackets_nested_too_deep_are_no_answer(checker: _Checker) -> None:
    for nested in ("(1," * 240 + "1" + ")" * 240, "{" * 490 + "}" * 490, "(" * 980):
        request = {"response": rf"\boxed{{{nested}}}", "answer": nested + "+1", "cpu_seconds": 0.5}
        assert checker.ask(request) == {"matches": False}


def _cpu_seconds(pid: int) -> float:
    """Of a process, of its children that have ended, and of the one that runs."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    child = Path(f"/proc/{_child_of(pid)}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15] + child[11:13])) / os.sysconf("SC_CLK_TCK")


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def test_a_checker_that_dies_of_something_else_is_an_error() -> None:
    checker = _Checker()
    assert checker.ask({"response": "1", "answer": "1", "cpu_seconds": 1}) == {"matches": True}
    child = _child_of(checker.pid)
    os.kill(child, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, (child, signal.SIGKILL)).start()
    try:
        with pytest.raises(RuntimeError, match="died with status -9"):
            checker.ask({"response": "1", "answer": "1", "cpu_seconds": 1})
    finally:
        checker.close()
