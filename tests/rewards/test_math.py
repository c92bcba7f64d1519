"""The math reward: what it takes for the final answer, that it is right about GSM8K, and that its bound holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dagrl.rewards.math import math_reward
from dagrl.rewards.math_checker import matches

GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k"
ENDLESS = r"\boxed{9^{9^{9^{9}}}}"


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So it is \boxed{18}.", "18"),
        ("#### 18", "18"),
        ("She has 18 apples.", "18"),
        ("It costs $18.00", "18"),
        (r"\boxed{0.5}", r"\frac{1}{2}"),
        ("answer: 5/2", "2.5"),
        ("#### 1,234", "1234"),
        (r"$\boxed{x^2+2x+1}$", "(x+1)^2"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"\boxed{x=5}", "5"),
        (r"first \boxed{17}, no: \boxed{18}", "18"),
        (r"\boxed{\frac{\sqrt{2}}{2}} as I said at 3 o'clock", r"\frac{1}{\sqrt 2}"),
        ("#### 18\n\nQuestion: how many are 3 and 4?", "18"),
        ("#### Step 2: add\nThat makes 18", "18"),
        ("18", "9 + 9 = 18, so\n#### 18"),
        ("18", r"\boxed{18}"),
        (r"\boxed{\frac{2}{3}}", r"\$\dfrac23 \approx \$0.67"),
        ("<answer> 18 </answer>", "18"),
        ("#### **18**", "18"),
        ("#### −18", "-18"),
        (r"\boxed{1\,800}", "1800"),
        (r"\boxed{8.7e8}", r"8.7\times 10^{8}"),
        (r"\boxed{2**10}", "1024"),
        (r"\boxed{x²+√2}", r"x^2+\sqrt{2}"),
        (r"\boxed{½}", "0.5"),
        (r"\boxed{45°}", r"45^\circ"),
        (r"\boxed{\emptyset}", r"\varnothing"),
        (r"\boxed{50\%}", "50"),
        (r"\boxed{50\%}", "0.5"),
        (r"\boxed{50}", r"50\%"),
        (r"\boxed{0.5}", r"$50\%$"),
        (r"\boxed{50 percent}", r"50\%"),
        ("It is 50%", r"50\%"),
    ],
)
def test_right_answers(response: str, answer: str) -> None:
    assert matches(response, answer)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{17}", "18"),
        (r"18, so \boxed{17}", "18"),
        (r"first \boxed{18}, no: \boxed{17}", "18"),
        ("18\n#### 17", "18"),
        ("18, and then 19", "18"),
        ("", "18"),
        ("####", "18"),
        (r"\boxed{}", "18"),
        ("I do not know.", "18"),
        ("lorem ipsum $ dolor ### sit } amet {", "18"),
        (r"\boxed{(2,1)}", "(1,2)"),
        (r"\boxed{x+1}", "x+2"),
        (r"\boxed{1\,000}", "0"),
        (r"\boxed{0.5\%}", r"50\%"),
        (r"\boxed{5}", r"50\%"),
        (r"\boxed{\%}", "5"),
        ("<answer></answer>", "18"),
        (rf"\boxed{{{'1,' * 600}1}}", "1"),
    ],
)
def test_wrong_answers(response: str, answer: str) -> None:
    assert not matches(response, answer)


@pytest.mark.parametrize("answer", ["", "  ", "####", r"\boxed{}"])
def test_a_reference_without_an_answer_is_refused(answer: str) -> None:
    with pytest.raises(ValueError, match="holds nothing to compare with"):
        math_reward("18", answer)


def test_a_bound_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout_s of the math reward must be above 0"):
        math_reward("18", "18", timeout_s=0)


def test_the_bound_holds_in_any_thread_and_work_goes_on() -> None:
    def one_after_another() -> tuple[float, float, float]:
        return (math_reward("18", "18"), math_reward(ENDLESS, "18", timeout_s=0.5), math_reward("17", "17"))

    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(2) as threads:
        begin = time.monotonic()
        results = [future.result() for future in [threads.submit(one_after_another) for _ in range(2)]]
        seconds = time.monotonic() - begin
    assert results == [(1.0, 0.0, 1.0)] * 2
    # Four starts of a process that loads sympy, and two bounds; a machine with other work takes its time for that.
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
        "print(math._CHECKERS._idle[0]._process.pid, flush=True)\n"
        rf"math.math_reward(r'{ENDLESS}', '1', timeout_s=1)"
    )
    process = subprocess.Popen([sys.executable, "-c", caller], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    checker = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 30
    while _runs(checker):
        assert time.monotonic() < deadline, "the checker outlived its caller"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_checker_that_dies_of_something_else_is_an_error() -> None:
    from dagrl.rewards.math import _Checker

    checker = _Checker()
    os.kill(checker._process.pid, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, (checker._process.pid, signal.SIGKILL)).start()
    try:
        with pytest.raises(RuntimeError, match="died with status -9"):
            checker.ask({"response": "1", "answer": "1", "cpu_seconds": 1})
    finally:
        checker.close()


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the data set's original files are not here")
def test_references_of_gsm8k_are_confirmed() -> None:
    rows = [json.loads(line) for line in (GSM8K / "test.jsonl").read_text().splitlines()[::3]]
    golds = [row["answer"].rpartition("####")[2].strip() for row in rows]
    assert all(matches(row["answer"], gold) for row, gold in zip(rows, golds, strict=True))
    assert all(matches(f"The answer is \\boxed{{{gold}}}", gold) for gold in golds)
    assert not any(matches(f"The answer is \\boxed{{{gold}1}}", gold) for gold in golds)
