"""A user's program for a trajectory, as a process."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import pytest

from dagrl.log_ends import LogEnds
from dagrl.ops.agents.programs import CommandProgram, ServiceProgram
from dagrl.ops.agents.results import ProgramError, ProgramResult
from tests.helpers.hostile_http import Answer, cut, endless, hostile, said, slow_body

SECRET = "xyzzy words"


def run(folder: Path, code: str):
    program = CommandProgram(("python", "-c", code), {"A": SECRET}, folder)
    return asyncio.run(program.run("http://127.0.0.1:1/v1", "key", {}))


def test_the_output_of_a_command_has_no_value_of_its_environment(tmp_path: Path) -> None:
    assert run(tmp_path, "import os, sys; sys.stdin.read(); print('A is', os.environ['A'])").output == "A is ***\n"


def test_the_report_of_a_failure_has_no_secret_either(tmp_path: Path) -> None:
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


KEY = "key of the session"


def ask(url: str, timeout_s: float = 20.0) -> ProgramResult:
    async def run() -> ProgramResult:
        program = ServiceProgram(url)
        try:
            async with asyncio.timeout(timeout_s):
                return await program.run("http://127.0.0.1:1/v1", KEY, {"answer": "1"})
        finally:
            await program._client.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        pytest.param(endless, "it answered with more than 16 MiB", id="endless"),
        pytest.param(cut, "it cannot be reached", id="cut"),
        pytest.param(lambda send: send(b"\0" * 1000), "it cannot be reached", id="no HTTP"),
        pytest.param(
            said(gzip.compress(b" " * (64 << 20)), headers="Content-Encoding: gzip"),
            "it answered in the encoding 'gzip'",
            id="gzip",
        ),
        pytest.param(said(b"", "302 Found", "Location: http://[::1"), "it answers with a redirect to no", id="nowhere"),
        pytest.param(said(b"1", "302 Found", "X: 1"), "it answered 302: 1", id="a redirect to nothing"),
        pytest.param(said(b"[" * 100_000), "it answered in another form than JSON", id="deep"),
        pytest.param(said(b'{"reward": NaN}'), "it returned .* return a number", id="NaN"),
        pytest.param(said(b'{"reward": -Infinity}'), "it returned .* return a number", id="infinity"),
        pytest.param(said(b'{"reward": 1e400}'), "it returned .* return a number", id="huge"),
        pytest.param(said(b'{"reward": ' + b"9" * 5000 + b"}"), "it answered in another form than JSON", id="digits"),
        pytest.param(said(b"[1, 2]"), "it returned .* return a number", id="two"),
        pytest.param(said(b'"1"'), "it returned .* return a number", id="text"),
        pytest.param(said(b'{"a\\nb": 1}'), "it returned a number 'a.*'; give it a shorter name", id="two lines"),
        pytest.param(said(b'{"\\ud800": 1}'), "it returned a number .*; give it a shorter name", id="half a character"),
        pytest.param(
            said(json.dumps({"a" * 1_000_000: 1}).encode()), "it returned a number 'a+.*a?; give it", id="a long name"
        ),
        pytest.param(
            said(json.dumps({f"a{number}": 1 for number in range(5000)}).encode()),
            "it returned 5,000 numbers",
            id="many",
        ),
        pytest.param(said(b"<html>\n" + KEY.encode()), r"in another form than JSON: <html>\\n\*\*\*", id="the key"),
        pytest.param(said(b"busy\n" + KEY.encode(), "503 Busy"), r"it answered 503: busy\\n\*\*\*", id="busy"),
    ],
)
def test_a_service_that_answers_with_anything_fails(answer: Answer, told: str) -> None:
    with hostile(answer) as (url, _), pytest.raises(ProgramError, match=told) as caught:
        ask(url)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_a_slow_service_ends_with_its_time() -> None:
    with hostile(slow_body) as (url, _), pytest.raises(TimeoutError):
        ask(url, timeout_s=1.0)


@pytest.mark.parametrize("status", ["302 Found", "307 Temporary Redirect", "308 Permanent Redirect"])
def test_no_row_follows_a_redirect_to_another_service(status: str) -> None:
    with hostile(said(b"1")) as (other, asked), hostile(said(b"", status, f"Location: {other}/a")) as (url, _):
        with pytest.raises(ProgramError, match=r"it answers with a redirect to http://127.*, another service"):
            ask(url)
        assert not asked
