"""The `code` reward: 1 if the program in a response passes all tests of the answer, or the share that it passes.

Expected values stay in this process, except those in test code other than ``assert CODE == LITERAL``.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import PositiveFloat, PositiveInt

from dagrl.plugins.declarations import reward
from dagrl.rewards import sandbox
from dagrl.rewards.code.tests import (
    AssertTests,
    Check,
    FunctionTests,
    ProgramTests,
    Tests,
    decoded,
    read_tests,
    same_output,
    same_value,
)

# Possessive quantifiers avoid backtracking within a line: a degenerate policy writes very long lines.
_BLOCK = re.compile(
    r"^(?P<indent>[ \t]*+)(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<language>\w*+)[^\n]*+\n(?P<code>.*?)"
    r"(?=^[ \t]*+(?P=fence)|\Z)(?:^[ \t]*+(?P=fence)[`~]*+[ \t]*+$)?",
    re.MULTILINE | re.DOTALL,
)
_PYTHON = ("python", "python3", "py")


def program_in(response: str) -> str | None:
    """The last Markdown block of Python in a response, else the last block without a language, else None.

    Fences are three or more backticks or tildes. An unclosed block extends to the end of the response.
    """
    blocks = [
        (programs["language"].lower(), _dedented(programs["code"], len(programs["indent"])))
        for programs in _BLOCK.finditer(response)
    ]
    for wanted in (_PYTHON, ("",)):
        programs = [code for language, code in blocks if language in wanted and code.strip()]
        if programs:
            return programs[-1]
    return None


def _dedented(code: str, indent: int) -> str:
    """The lines without the indentation of the fence, as in an item of a list."""
    return re.sub(rf"^[ \t]{{1,{indent}}}", "", code, flags=re.MULTILINE) if indent else code


_START_S = 5.0
"""Extra time for Python to start and load the solution if several tests share a process."""


_REPLY_CHARACTERS, _REPLY_RATIO = 1000, 20
"""A value's JSON has at most this ratio to the text of an equal one, such as that of emojis, and some more."""


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Limits for all runs of one response."""

    timeout_s: float
    memory_mib: int
    hide_files: bool
    deadline: float
    """A time on the monotonic clock."""
    stops: bool
    """Whether to stop at the first test that fails."""

    def run(self, code: str, *, stdin: str, timeout_s: float, files: dict[str, str] | None = None) -> sandbox.Result:
        """Run in the sandbox, at most until the deadline."""
        return sandbox.run(
            code,
            stdin=stdin,
            files=files,
            timeout_s=max(min(timeout_s, self.deadline - time.monotonic()), 0.01),
            memory_mib=self.memory_mib,
            hide_files=self.hide_files,
        )


@reward(concurrency=len(os.sched_getaffinity(0)))
def code_reward(
    response: str,
    answer: str,
    *,
    continuous: bool = False,
    timeout_s: PositiveFloat = 10.0,
    total_timeout_s: PositiveFloat = 60.0,
    max_tests: PositiveInt | None = None,
    memory_mib: PositiveInt = 1024,
    hide_files: bool = True,
) -> float:
    """1.0 if the program in `response` passes all tests in `answer`, else 0.0; `continuous`: the share it passes.

    `answer` is JSON; see `read_tests`. The program is the one that `program_in` finds; without one, the reward is 0.
    A test may take `timeout_s` seconds, all tests together `total_timeout_s`; tests that have not run by then fail.
    Only the first `max_tests` tests run. Programs run in the sandbox; see `dagrl.rewards.sandbox.run` for `memory_mib`
    and `hide_files`. Raises ValueError for an `answer` without tests or a limit that is not above 0, and OSError if
    this machine cannot confine programs. May be called from any thread.
    """
    limits = {"timeout_s": timeout_s, "total_timeout_s": total_timeout_s, "max_tests": max_tests}
    for name, value in limits.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} of the code reward must be above 0, not {value}")
    tests = read_tests(answer)
    program = program_in(response)
    if program is None:
        return 0.0
    bounds = _Bounds(timeout_s, memory_mib, hide_files, time.monotonic() + total_timeout_s, not continuous)
    total = passed = 0
    for passes in _verdicts(program, tests, max_tests, bounds):
        if not (passes or continuous):
            return 0.0
        total, passed = total + 1, passed + passes
    return passed / total


def _verdicts(program: str, tests: Tests, most: int | None, bounds: _Bounds) -> Iterator[bool]:
    match tests:
        case ProgramTests():
            return _of_programs(program, tests.inputs[:most], tests.outputs[:most], bounds)
        case FunctionTests():
            return _of_calls(program, FunctionTests(tests.name, tests.arguments[:most], tests.returned[:most]), bounds)
        case AssertTests():
            return _of_asserts(program, tests.checks[:most], bounds)


def _of_programs(program: str, inputs: tuple[str, ...], outputs: tuple[str, ...], bounds: _Bounds) -> Iterator[bool]:
    """Run each test in a separate process, as contest judges do, so that tests share no state."""
    no_program = False
    for given, expected in zip(inputs, outputs, strict=True):
        if no_program or time.monotonic() >= bounds.deadline:
            yield False
            continue
        result = bounds.run(program, stdin=given, timeout_s=bounds.timeout_s)
        no_program = _is_no_python(result)
        yield result.finished and same_output(result.stdout, expected)


def _is_no_python(result: sandbox.Result) -> bool:
    """Whether the program has a syntax error, so that it fails for every input."""
    last = result.stderr.rstrip().rpartition("\n")[2]
    return not result.finished and last.startswith(("SyntaxError:", "IndentationError:", "TabError:"))


def _of_calls(program: str, tests: FunctionTests, bounds: _Bounds) -> Iterator[bool]:
    order = {"name": tests.name, "arguments": tests.arguments, **_how(bounds)}
    result = bounds.run(
        _harness("call"),
        stdin=json.dumps(order),
        files={"solution.py": program},
        timeout_s=_START_S + bounds.timeout_s * len(tests.arguments),
    )
    replies = [*result.stdout.split("\n")[:-1], *[""] * len(tests.returned)]
    for reply, expected in zip(replies, tests.returned, strict=False):
        yield _returned(reply, expected)


def _how(bounds: _Bounds) -> dict[str, float | bool]:
    return {"timeout_s": bounds.timeout_s, "stops": bounds.stops}


def _returned(reply: str, expected: tuple[object, ...]) -> bool:
    """Whether a call's reply contains one of the expected values. The program may have forged the reply."""
    try:
        said = json.loads(reply)
        return isinstance(said, list) and len(said) == 1 and any(same_value(said[0], value) for value in expected)
    except (ValueError, RecursionError, OverflowError):
        return False


def _of_asserts(program: str, checks: tuple[Check, ...], bounds: _Bounds) -> Iterator[bool]:
    """Run all tests in one process with the program. Replies start with a random key, generated for this run."""
    key = secrets.token_hex(16)
    order = {"key": key, "shows": [check.shows for check in checks], **_how(bounds)}
    result = bounds.run(
        _harness("assert"),
        stdin=json.dumps(order),
        files={"solution.py": program, **{f"test_{number}.py": value.code for number, value in enumerate(checks)}},
        timeout_s=_START_S + bounds.timeout_s * len(checks),
    )
    replies: dict[str, str] = {}
    for line in result.stdout.split("\n"):
        said, _, reply = line.partition(" ")
        if said == key:
            which, _, value = reply.partition(" ")
            replies.setdefault(which, value)
    for number, check in enumerate(checks):
        yield _holds(check, replies.get(str(number)))


def _holds(check: Check, reply: str | None) -> bool:
    """Whether a test passes, given its reply, or None if it did not reply."""
    if reply is None or not check.shows:
        return reply is not None
    # A forged set of numbers with one hash takes hours to build.
    if len(reply) > _REPLY_CHARACTERS + _REPLY_RATIO * len(repr(check.expected)):
        return False
    try:
        return bool(decoded(json.loads(reply)) == check.expected)
    except (ValueError, TypeError, RecursionError, OverflowError):
        return False


@cache
def _harness(kind: str) -> str:
    return Path(__file__).with_name(f"{kind}_harness.py").read_text()
