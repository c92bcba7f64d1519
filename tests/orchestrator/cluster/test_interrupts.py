"""Ctrl-C, SIGTERM and SIGHUP, as a real process gets them: at its steps, before and behind them."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from dagrl.orchestrator.cluster.interrupts import ONE_REQUEST_S

PROGRAM = """
import asyncio
import os
import signal
import subprocess
import sys
from dagrl.orchestrator.cluster.interrupts import InterruptHandler, ignore_signals
from dagrl.orchestrator.cluster.interrupts import keep_signals_from_ray, signals_as_ctrl_c

def say(text):
    print(text, flush=True)

async def steps():
    with InterruptHandler(lambda: say("asked to stop"), lambda message: say("noted")) as interrupts:
        interrupts.training = True
        say("ready")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            say("cancelled")
    say("over")

def wait():
    say("ready")
    sys.stdin.read()

def protected():
    with ignore_signals():
        wait()
    say("whole")

def as_ray():
    with keep_signals_from_ray():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
        wait()

def born():
    # As Ray starts its processes.
    kind = {"args": ["sleep", "60"], "preexec_fn": lambda: None}
    with keep_signals_from_ray():
        rays = subprocess.Popen(**kind)
    ours = subprocess.Popen(**kind)
    say([os.getpgid(each.pid) == os.getpgid(0) for each in (rays, ours)])
    rays.kill()
    ours.kill()

def after_ray():
    with keep_signals_from_ray():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait()

try:
    with signals_as_ctrl_c():
        {}
except KeyboardInterrupt:
    say("interrupted")
"""
KIN = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


class Process:
    """A running program that prints a line for each event."""

    def __init__(self, what: str, ignored: tuple[int, ...] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.replace("{}", what)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: [
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL) for number in KIN
            ],
        )

    def says(self) -> str:
        """Its next line."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def gets(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def rest(self) -> str:
        """Its remaining output after the end of its input."""
        return self._process.communicate(timeout=120)[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_asks_for_the_end_of_the_step_and_the_second_ends_it(number) -> None:
    process = Process("asyncio.run(steps())")
    assert process.says() == "ready"
    process.gets(number)
    assert [process.says(), process.says()] == ["noted", "asked to stop"]
    # As `timeout` does, which tells its child and then its group.
    process.gets(number)
    time.sleep(2 * ONE_REQUEST_S)
    process.gets(number)
    assert process.rest().split("\n") == ["cancelled", "over", ""]


@pytest.mark.parametrize(
    ("number", "what"),
    [(signal.SIGTERM, "wait()"), (signal.SIGHUP, "wait()"), (signal.SIGTERM, "after_ray()")],
)
def test_elsewhere_they_are_an_exception(number, what) -> None:
    process = Process(what)
    assert process.says() == "ready"
    process.gets(number)
    assert process.rest() == "interrupted\n"


def test_while_ray_starts_its_own_end_is_the_exception() -> None:
    process = Process("as_ray()")
    assert process.says() == "ready"
    process.gets(signal.SIGTERM)
    assert process.rest() == "interrupted\n"


def test_rays_processes_are_in_no_signalled_process_group() -> None:
    assert Process("born()").rest() == "[False, True]\n"


def test_signals_do_not_interrupt_critical_sections() -> None:
    process = Process("protected()")
    assert process.says() == "ready"
    for number in KIN:
        process.gets(number)
    assert process.rest() == "whole\n"


def test_a_hangup_that_nohup_has_switched_off_is_none() -> None:
    process = Process("wait()", ignored=(signal.SIGHUP,))
    assert process.says() == "ready"
    process.gets(signal.SIGHUP)
    assert process.rest() == ""


def test_a_background_job_of_a_script_receives_its_signals() -> None:
    process = Process("wait()", ignored=(signal.SIGINT,))
    assert process.says() == "ready"
    process.gets(signal.SIGTERM)
    assert process.rest() == "interrupted\n"


def test_output_to_a_closed_terminal_is_no_error(tmp_path) -> None:
    program = PROGRAM.replace('say("interrupted")', f"say('late'); open({str(tmp_path / 'reached')!r}, 'w')")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program.replace("{}", "wait()")],
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    os.close(theirs)
    assert b"ready" in os.read(ours, 1000)
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=120)
    assert (errors, process.returncode) == (b"", 0)
    assert (tmp_path / "reached").exists()
