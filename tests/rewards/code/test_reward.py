"""Programs of a policy, honest and not, and the reward they get."""

from __future__ import annotations

import json

import pytest

from dagrl.rewards.code.reward import _holds, code_reward
from dagrl.rewards.code.tests import Check
from dagrl.rewards.score import RewardError, Samples, score

PROGRAM = json.dumps({"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]})
FUNCTION = json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4], [5, 6]], "outputs": [[3], [7], [11]]})
ASSERTS = json.dumps(["assert add(1, 2) == 3", "assert add(3, 4) == 7", "import math\nassert add(5, 6) == 11"])

HONEST = {
    PROGRAM: "a, b = map(int, input().split())\nprint(a + b)",
    FUNCTION: "def add(a, b):\n    return a + b",
    ASSERTS: "def add(a, b):\n    return a + b",
}
SECOND_WRONG = {
    PROGRAM: "a, b = map(int, input().split())\nprint(a + b if a != 3 else 'seven')",
    FUNCTION: "def add(a, b):\n    return a + b if a != 3 else None",
    ASSERTS: "def add(a, b):\n    return a + b if a != 3 else None",
}
SECOND_RAISES = {
    PROGRAM: "a, b = map(int, input().split())\nassert a != 3\nprint(a + b)",
    FUNCTION: "def add(a, b):\n    assert a != 3\n    return a + b",
    ASSERTS: "def add(a, b):\n    if a == 3: raise SystemExit\n    return a + b",
}
SECOND_ENDLESS = {
    PROGRAM: "a, b = map(int, input().split())\nwhile a == 3: pass\nprint(a + b)",
    FUNCTION: "def add(a, b):\n    while a == 3: pass\n    return a + b",
    ASSERTS: "def add(a, b):\n    while a == 3: pass\n    return a + b",
}


def answering(code: str) -> str:
    return f"Let me think.\n```python\n{code}\n```\nDone."


@pytest.fixture(params=[PROGRAM, FUNCTION, ASSERTS], ids=["program", "function", "asserts"])
def tests(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("continuous", [False, True])
def test_a_right_program_gets_one(tests: str, continuous: bool) -> None:
    assert code_reward(answering(HONEST[tests]), tests, continuous=continuous) == 1.0


@pytest.mark.parametrize("programs", [SECOND_WRONG, SECOND_RAISES, SECOND_ENDLESS], ids=["wrong", "raises", "endless"])
def test_one_that_fails_a_test_gets_its_share(tests: str, programs: dict[str, str]) -> None:
    # A program's time has the start of Python in it.
    timeout_s = 3.0 if tests == PROGRAM else 0.5
    share = code_reward(answering(programs[tests]), tests, timeout_s=timeout_s, continuous=True)
    assert share == pytest.approx(2 / 3)


def test_one_that_fails_a_test_gets_nothing_where_shares_do_not_count(tests: str) -> None:
    assert code_reward(answering(SECOND_WRONG[tests]), tests) == 0.0


@pytest.mark.parametrize("tests", [FUNCTION, ASSERTS], ids=["function", "asserts"])
def test_without_shares_nothing_runs_behind_a_test_that_raises(tests: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results, run = [], code_reward.__globals__["sandbox"].run
    monkeypatch.setattr(
        "dagrl.rewards.sandbox.run", lambda *told, **more: results.append(run(*told, **more)) or results[-1]
    )
    assert code_reward(answering(SECOND_RAISES[tests]), tests) == 0.0
    assert code_reward(answering(SECOND_RAISES[tests]), tests, continuous=True) > 0
    stopped, went_on = (result.stdout.count("\n") for result in results)
    assert stopped == went_on - 1


def test_only_the_first_tests_may_be_asked_for(tests: str) -> None:
    assert code_reward(answering(SECOND_WRONG[tests]), tests, max_tests=1) == 1.0
    assert code_reward(answering(SECOND_WRONG[tests]), tests, max_tests=2, continuous=True) == 0.5


def test_a_program_that_cannot_run_scores_zero(tests: str) -> None:
    for response in ("", "no code", answering("def add(:"), answering("import no_such_module")):
        assert code_reward(response, tests, continuous=True) == 0.0


def test_a_program_that_python_cannot_read_is_not_tried_again_with_each_input(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    run = code_reward.__globals__["sandbox"].run
    monkeypatch.setattr("dagrl.rewards.sandbox.run", lambda *given, **more: runs.append(1) or run(*given, **more))
    assert code_reward(answering("print("), PROGRAM, continuous=True) == 0.0
    assert len(runs) == 1


def test_tests_that_have_not_run_in_the_whole_time_are_not_passed() -> None:
    slow = "import time\ntime.sleep(0.5)\na, b = map(int, input().split())\nprint(a + b)"
    many = json.dumps({"inputs": ["1 2"] * 40, "outputs": ["3"] * 40})
    assert 0 < code_reward(answering(slow), many, continuous=True, total_timeout_s=5) < 0.5


def test_solutions_of_leetcode_find_what_its_editor_has_imported() -> None:
    code = """
class Solution:
    def most(self, nums: List[int]) -> Optional[int]:
        print("a word in between")
        return pow(Counter(nums).most_common(1)[0][0], 1, 10 ** 9)
"""
    tests = json.dumps({"fn_name": "most", "inputs": ["[1, 2, 2]"], "outputs": ["2"]})
    assert code_reward(answering(code), tests) == 1.0


@pytest.mark.parametrize(
    ("code", "returned"),
    [("return (1, 2)", [1, 2]), ("return {1: 2}", {"1": 2}), ("import numpy\n    return numpy.arange(2)", [0, 1])],
)
def test_values_that_json_has_no_name_for_are_compared_as_its_nearest(code: str, returned: object) -> None:
    tests = json.dumps({"fn_name": "f", "inputs": [[]], "outputs": [returned]})
    assert code_reward(answering(f"def f():\n    {code}"), tests) == 1.0


@pytest.mark.parametrize(
    ("returned", "expected", "share"),
    [("'5'", '"5"', 1), ("'5'", "5", 1), ("5", "5", 1), ("'yes'", "yes", 1), ("'[1]'", "[1]", 1), ("'6'", "5", 0),
     ("'true'", "true", 1), ("True", "true", 1), ("'5'", 5, 0)],
)  # fmt: skip
def test_an_expected_text_may_be_the_value_or_json(returned: str, expected: object, share: float) -> None:
    tests = json.dumps({"fn_name": "f", "inputs": [[]], "outputs": [expected]})
    assert code_reward(answering(f"def f():\n    return {returned}"), tests) == share


CHEATS: dict[str, str] = {
    "ends with success": "import sys\nsys.exit(0)",
    "ends at once": "import os\nos._exit(0)",
    "is equal to all": "class All:\n    __eq__ = lambda *_: True\ndef add(a, b):\n    return All()\nprint(All())",
    "says that all is well": "print('passed\\n' * 3)\nimport os\nos.write(1, b'0\\n1\\n2\\n')\nos._exit(0)",
    "looks for what is expected": (
        "import os\nfound = ''.join(open(name).read() for name in os.listdir())\n"
        "outputs = [each for each in ('11', '7') if each in found]\nprint(outputs[0])\n"
        "def add(a, b):\n    return int(outputs[0]) if a == 5 else 3"
    ),
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_get_nothing(name: str, tests: str) -> None:
    assert code_reward(answering(CHEATS[name]), tests) == 0.0


@pytest.mark.parametrize("name", ["ends with success", "ends at once", "says that all is well"])
def test_cheats_get_nothing_of_asserts_that_compare_nothing(name: str) -> None:
    tests = json.dumps(["assert add(1, 2)", "assert add(3, 4) > 6"])
    assert code_reward(answering(CHEATS[name]), tests, continuous=True) == 0.0
    assert code_reward(answering(HONEST[ASSERTS]), tests) == 1.0


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("(1, 2)", "(1, 2)"),
        ("{3: {1}}", "{3: {1}}"),
        ("Counter('aab')", "{'a': 2, 'b': 1}"),
        ("numpy.arange(2)", "[0, 1]"),
        ("True", "1"),
        ("2", "2.0"),
        ("b'x'", "b'x'"),
        ("{2, 1}", "set([1, 2])"),
    ],
)
def test_asserts_compare_as_python_does(returned: str, expected: str) -> None:
    code = f"import numpy\nfrom collections import Counter\ndef f():\n    return {returned}"
    right, wrong = f"assert f() == {expected}", f"assert f() == [{expected}]"
    assert code_reward(answering(code), json.dumps([right, wrong, wrong]), continuous=True) == pytest.approx(1 / 3)


def test_forged_replies_do_no_harm_here() -> None:
    tests = json.dumps({"fn_name": "f", "inputs": [[]], "outputs": [1]})
    # The harness's own copy of standard output is the first number that is free.
    for forged in (
        "b'[' * 200_000 + b'\\n'",
        "b'[1e999, 1]\\n'",
        "b'\\xff\\n'",
        "b'{}\\n'",
        "b'[' + b'9' * 5000 + b']\\n'",
    ):
        code = (
            f"import os\nfor fd in range(3, 9):\n    try: os.write(fd, {forged})\n    except OSError: pass\nos._exit(0)"
        )
        assert code_reward(answering(code), tests) == 0.0


HOSTILE: dict[str, str] = {
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "starts threads": (
        "import threading, time\nthreading.stack_size(1 << 16)\n"
        "while True: threading.Thread(target=time.sleep, args=(60,)).start()"
    ),
    "takes memory": "taken = []\nwhile True: taken.append(bytearray(1 << 24))",
    "prints without end": "while True: print('3\\n' * 32768)",
    "fills the disk": "for number in range(10**6): open(str(number), 'wb').write(bytes(1 << 20))",
    "reads keys": "import os\nprint(open(os.path.expanduser('~/.ssh/id_ed25519')).read())",
    "reads the environment": "import os\nprint(open(f'/proc/{os.getppid()}/environ').read())",
    "writes outside": "open('/tmp/dagrl-outside', 'w').write('x')",
    "opens a connection": "import socket\nsocket.create_connection(('127.0.0.1', 22), timeout=3)",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "kills all": "import os\nos.kill(-1, 9)",
    "kills its group": "import os\nos.killpg(0, 9)",
    "exits with a status": "import os\nos._exit(137)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "closes its output": "import os\nos.closerange(0, 1000)\nprint(3)",
    "goes deep": "import sys\nsys.setrecursionlimit(10**9)\ndef down(n): return down(n + 1) + 1\nprint(down(0))",
    "hangs at its end": "import atexit, time\natexit.register(time.sleep, 60)",
    "is no text": "x = '\ud800\0'",
    "is nested": "x = " + "-" * 100_000 + "1",
    "returns a cycle": "x = []\nx.append(x)\ndef add(a, b): return x",
    "returns what is huge": "def add(a, b): return 'x' * (1 << 27)",
    "raises without end": (
        "class Error(BaseException):\n    def __str__(self):\n        while True: pass\n"
        "def add(a, b): raise Error\nraise Error"
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_costs_one_wrong_reward(name: str) -> None:
    # One of the three kinds of tests for each program: each was tried with all of them.
    tests = (PROGRAM, FUNCTION, ASSERTS)[[*HOSTILE].index(name) % 3]
    assert code_reward(answering(HOSTILE[name]), tests, timeout_s=1) == 0.0


def test_a_reply_that_takes_hours_to_decode_is_wrong() -> None:
    # All of these numbers have the hash 0.
    forged = json.dumps(["set", *(number * (2**61 - 1) for number in range(200_000))])
    assert not _holds(Check("", shows=True, expected={1}), forged)
    honest = {f"\N{GRINNING FACE}{number}" for number in range(1000)}
    assert _holds(Check("", shows=True, expected=honest), json.dumps(["set", *honest]))


@pytest.mark.parametrize("limit", [{"timeout_s": 0}, {"total_timeout_s": -1.0}, {"max_tests": 0}])
def test_limits_that_are_none_are_refused(limit: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(limit))} of the code reward must be above 0"):
        code_reward("", PROGRAM, **limit)


def test_samples_are_scored_at_once_and_a_bad_answer_names_its_sample() -> None:
    def scored(answers: list[str], on_error: str | float = "stop") -> list[float]:
        rows = range(len(answers))
        responses = [answering(HONEST[PROGRAM])] * len(answers)
        samples = Samples(list(rows), ["sum"] * len(rows), responses, answers, ["sums"] * len(rows), [{} for _ in rows])
        return score(code_reward, samples, args={}, on_error=on_error).rewards.tolist()

    wrong = json.dumps({"inputs": ["1 2"], "outputs": ["4"]})
    assert scored([PROGRAM, wrong, PROGRAM]) == [1, 0, 1]
    with pytest.raises(RewardError, match=r"(?s)'seven' is not JSON.*sample 1 "):
        scored([PROGRAM, "seven", "eight"])
    assert scored([PROGRAM, "seven", wrong], on_error=-1.0) == [1, -1, 0]
