"""A user's program for a trajectory, as a process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dagrl.log_ends import LogEnds
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


def test_the_ends_of_what_a_command_prints_without_end_are_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    largest = 0
    cut = LogEnds.cut

    def watched(log: LogEnds) -> None:
        nonlocal largest
        cut(log)
        (output,) = tmp_path.glob("dagrl-agent-*/output")
        largest = max(largest, output.stat().st_size)

    monkeypatch.setattr(LogEnds, "cut", watched)
    code = "import sys, time\nfor _ in range(6):\n  print('x' * 10_000_000, flush=True); time.sleep(0.6)\nprint('end')"
    assert run(tmp_path, code).output.endswith("x\nend\n")
    assert 0 < largest < 60_000_000
