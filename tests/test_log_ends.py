"""Files to which user code prints keep their ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dagrl.log_ends import END_BYTES, LogEnds, ends_of, shortened

MIB = 1 << 20
REMOVED = re.compile(r"\n\.\.\. (\d+) bytes were printed here, and are not kept \.\.\.\n")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.write_bytes(b"begin\n")
    return path


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def test_a_short_file_is_kept_whole(log: Path) -> None:
    append(log, b"x" * 3 * MIB)
    LogEnds(log).cut()
    assert log.stat().st_size == 3 * MIB + 6
    assert ends_of(log) == "begin\n" + "x" * 3 * MIB


def test_a_long_file_keeps_its_ends_and_says_how_much_is_gone(log: Path) -> None:
    ends, printed = LogEnds(log), 6
    for round in range(5):
        text = b"x" * (5 + round) * MIB + b"end of %d\n" % round
        append(log, text)
        printed += len(text)
        assert ends_of(log).endswith(f"end of {round}\n")
        ends.cut()
        kept = log.read_text()
        assert kept.startswith("begin\nxxx") and kept.endswith(f"xxxend of {round}\n")
        (removed,) = REMOVED.findall(kept)
        assert int(removed) == printed - 2 * END_BYTES
        assert len(kept) < 2 * END_BYTES + 100


def test_only_the_ends_of_a_long_file_are_read(log: Path) -> None:
    with log.open("ab") as file:
        file.truncate(100 << 30)
    append(log, b"end\n")
    text = ends_of(log)
    assert text.startswith("begin\n\0\0") and text.endswith("\0\0end\n")
    assert REMOVED.findall(text) == [str((100 << 30) + 4 - 2 * END_BYTES)]


def test_a_file_that_is_gone_is_no_error(tmp_path: Path) -> None:
    LogEnds(tmp_path / "log").cut()


def test_a_long_text_keeps_its_ends() -> None:
    assert shortened("x" * 3 * MIB) == "x" * 3 * MIB
    assert len(shortened("begin" + "x" * 50 * MIB + "end")) < 2 * END_BYTES + 100


PRINTING = {
    "prints": "print('x' * 65535, flush=True)",
    "writes": "os.write(2, b'x' * 65536)",
    "a child prints": "subprocess.run(['head', '-c', '1000000', '/dev/zero'])",
    "a library prints": "libc.puts(b'x' * 65536)",
}


@pytest.mark.parametrize("name", PRINTING)
def test_a_process_that_prints_without_end_fills_no_disk(name: str, log: Path) -> None:
    program = f"""
import ctypes, os, subprocess, time
from dagrl.log_ends import keep_ends_of_output
keep_ends_of_output()
libc, largest, written, until = ctypes.CDLL(None), 0, 0, time.monotonic() + 60
while os.stat({str(log)!r}).st_size >= largest and time.monotonic() < until:
    largest = os.stat({str(log)!r}).st_size
    {PRINTING[name]}
print("end", flush=True)
"""
    with log.open("ab") as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, stderr=file, check=True, timeout=120)
    text = log.read_text()
    assert len(REMOVED.findall(text)) == 1
    assert text.startswith("begin\n") and text.endswith("end\n")


@pytest.mark.parametrize("where", ["a pipe", "a file that is not appended to"])
def test_output_that_cannot_be_cut_is_left_alone(where: str, log: Path) -> None:
    program = "import time\nfrom dagrl import log_ends\nlog_ends._MOST_BYTES, log_ends._LOOK_AT_OWN_EVERY_S = 1, 0.01\n"
    program += "log_ends.keep_ends_of_output()\nprint('x' * 100, flush=True)\ntime.sleep(0.2)"
    with log.open("r+b") if where != "a pipe" else os.fdopen(os.dup(2), "wb") as file:
        stdout = subprocess.PIPE if where == "a pipe" else file
        ended = subprocess.run([sys.executable, "-c", program], stdout=stdout, stderr=file, check=True)
    assert (ended.stdout or log.read_bytes()) == b"x" * 100 + b"\n"


def test_a_file_that_takes_the_place_of_the_output_for_a_while_is_kept_whole(log: Path, tmp_path: Path) -> None:
    captured = tmp_path / "captured"
    program = f"""
import os, time
from dagrl import log_ends
log_ends._MOST_BYTES, log_ends._LOOK_AT_OWN_EVERY_S = 1, 0.01
log_ends.keep_ends_of_output()
saved, own = os.dup(1), os.open({str(captured)!r}, os.O_WRONLY | os.O_CREAT)
os.dup2(own, 1)
os.write(1, b"x" * {3 * MIB})
time.sleep(0.2)
os.dup2(saved, 1)
"""
    with log.open("ab") as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, stderr=file, check=True)
    assert captured.read_bytes() == b"x" * 3 * MIB
