"""A user's program for a trajectory, as a process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dagrl.ops.agents.programs import CommandProgram, ProgramError

SECRET = "xyzzy words"


def run(folder: Path, code: str):
    program = CommandProgram(("python", "-c", code), {"A": SECRET}, folder)
    return asyncio.run(program.run("http://127.0.0.1:1/v1", "key", {}))


def test_the_output_of_a_command_has_no_value_of_its_environment(tmp_path: Path) -> None:
    assert run(tmp_path, "import os, sys; sys.stdin.read(); print('A is', os.environ['A'])").output == "A is ***\n"


def test_nor_has_what_is_said_of_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ProgramError) as caught:
        run(tmp_path, "import os, sys; sys.stdin.read(); sys.exit('A is ' + os.environ['A'])")
    assert SECRET not in f"{caught.value} {caught.value.output}" and "A is ***" in str(caught.value)
