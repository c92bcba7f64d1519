"""The python tool: what a policy is told of its programs."""

from __future__ import annotations

import pytest

from dagrl.plugins.tool import ToolUnavailableError, load_tool
from dagrl.rewards.sandbox import runner
from dagrl.tools.python import python


def test_output_is_returned() -> None:
    assert python("print(6 * 7)\nprint('and that')") == "42\nand that"


def test_an_exception_is_returned_after_earlier_output() -> None:
    told = python("print('so far')\n1 / 0")
    assert told.startswith("so far\nTraceback")
    assert told.endswith("ZeroDivisionError: division by zero")


def test_a_program_without_output_is_reported() -> None:
    assert python("x = 1") == "The program printed nothing."
    assert python("import os; os._exit(3)") == "It exited with status 3."


def test_a_program_without_end_is_ended() -> None:
    code = "import time\nprint('on', flush=True)\nwhile True: time.sleep(1)"
    # On a busy machine, Python alone needs more than a second to start.
    assert python(code, timeout_s=6.0) == "on\nThe program was stopped after 6 s."


def test_the_policy_sees_the_code_alone() -> None:
    parameters = load_tool("python", {"timeout_s": 2.0}).schema["function"]["parameters"]
    assert parameters == {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}


def test_a_machine_that_cannot_confine_programs_ends_the_run(monkeypatch) -> None:
    def refuse(*_, **__) -> None:
        raise OSError("this kernel has no seccomp")

    monkeypatch.setattr(runner.subprocess, "Popen", refuse)
    with pytest.raises(ToolUnavailableError, match="cannot run programs here: this kernel has no seccomp"):
        python("print(1)")
