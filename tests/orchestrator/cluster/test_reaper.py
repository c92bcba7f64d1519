"""The reaper, on real processes: it ends the processes of a killed driver, and leaves those of a clean one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dagrl.orchestrator.cluster import reaper

DRIVER = """
import json, os, subprocess, sys, time
from dagrl.orchestrator.cluster import reaper

folder = sys.argv[1]
watcher = subprocess.Popen([sys.executable, "-I", reaper.__file__], stdin=subprocess.PIPE, text=True,
                           start_new_session=True)
watcher.stdin.write(folder + "\\n")
watcher.stdin.flush()
# One that outlives a polite end, and one with a child of its own.
stubborn = subprocess.Popen(["bash", "-c", "trap '' TERM HUP; while true; do sleep 0.2; done"], start_new_session=True)
parent = subprocess.Popen(["bash", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
grandchild = int(parent.stdout.readline())
pids = [pid for pid in reaper.descendants(os.getpid()) if pid != watcher.pid]
assert {stubborn.pid, parent.pid, grandchild} <= set(pids), pids
watcher.stdin.write("".join(f"{reaper.identity(pid)}\\n" for pid in pids))
watcher.stdin.flush()
print(json.dumps({"watcher": watcher.pid, "left": [stubborn.pid, parent.pid, grandchild]}), flush=True)
time.sleep(1000)
"""


def running(pid: int) -> bool:
    """Whether the process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"not within 20 s: {what}"
        time.sleep(0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A session folder with something in it."""
    path = tmp_path / "session"
    (path / "logs").mkdir(parents=True)
    (path / "logs" / "raylet.out").write_text("...")
    return path


@pytest.fixture
def spawned() -> Iterator[list[str]]:
    """Identities of processes to end after the test, whatever has come of it."""
    identities: list[str] = []
    yield identities
    reaper.end(identities)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    """A process that would go on."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.fixture
def watcher() -> Iterator[subprocess.Popen]:
    """A reaper with the test as its driver."""
    command = [sys.executable, "-I", reaper.__file__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, **pipes) as process:
        yield process
        process.kill()


def test_a_killed_driver_leaves_no_process_and_no_folder(folder, spawned) -> None:
    command = [sys.executable, "-c", DRIVER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        told = json.loads(driver.stdout.readline())
        everyone = [told["watcher"], *told["left"]]
        spawned += [identity for pid in everyone if (identity := reaper.identity(pid))]
        assert all(running(pid) for pid in everyone)
        driver.kill()
    wait_until(lambda: not any(running(pid) for pid in told["left"]), "the processes are gone")
    wait_until(lambda: not folder.exists(), "the folder is gone")
    wait_until(lambda: not running(told["watcher"]), "the reaper itself is gone")


def test_a_driver_that_has_cleaned_up_is_left_alone(folder, watcher, sleeper) -> None:
    output, _ = watcher.communicate(f"{folder}\n{reaper.identity(sleeper.pid)}\n{reaper.CLEAN}\n", timeout=100)
    assert (watcher.returncode, output) == (0, "")
    assert (folder / "logs" / "raylet.out").exists()
    assert running(sleeper.pid)


def test_a_driver_killed_before_it_had_processes_leaves_no_folder(folder, watcher) -> None:
    output, _ = watcher.communicate(f"{folder}\n", timeout=100)
    assert (watcher.returncode, output) == (0, reaper.EPITAPH + "\n")
    assert not folder.exists()


def test_a_process_with_a_log_in_the_folder_ends_with_the_driver(folder, watcher) -> None:
    """A process like Ray's agents: not reported, renamed, and without its parent."""
    with (folder / "logs" / "agent.log").open("w") as log:
        agent = subprocess.Popen(["sleep", "1000"], stdout=log)
    with agent:
        watcher.communicate(f"{folder}\n", timeout=100)
        assert agent.wait(timeout=100) == -signal.SIGKILL
    assert not folder.exists()


def test_a_process_that_reads_or_removes_the_folder_is_spared(folder, watcher) -> None:
    with (folder / "logs" / "raylet.out").open() as log:
        reader = subprocess.Popen(["sleep", "1000"], stdin=log)
    opened = os.open(folder / "logs", os.O_RDONLY)
    remover = subprocess.Popen(["sleep", "1000"], pass_fds=[opened])
    os.close(opened)
    watcher.communicate(f"{folder}\n", timeout=100)
    assert not folder.exists()
    for each in (reader, remover):
        spared = each.poll() is None
        each.kill()
        each.wait()
        assert spared


def test_a_driver_killed_before_its_first_word_leaves_no_complaint(watcher) -> None:
    output, _ = watcher.communicate("", timeout=100)
    assert (watcher.returncode, output) == (0, "")


def test_processes_that_end_before_the_driver_are_no_trouble(folder, watcher) -> None:
    gone = subprocess.Popen(["true"])
    identity = reaper.identity(gone.pid)
    gone.wait()
    output, _ = watcher.communicate(f"{folder}\n{identity}\n", timeout=100)
    assert (watcher.returncode, output) == (0, reaper.EPITAPH + "\n")
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_reaper_outlives_the_signals_that_end_its_driver(folder, watcher, sleeper, number) -> None:
    def ignored() -> bool:
        status = Path(f"/proc/{watcher.pid}/status").read_text()
        mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
        return bool(int(mask, 16) >> (number - 1) & 1)

    wait_until(ignored, "the reaper ignores the signal")
    watcher.send_signal(number)
    watcher.communicate(f"{folder}\n{reaper.identity(sleeper.pid)}\n", timeout=100)
    assert sleeper.wait(timeout=100) == -signal.SIGKILL
    assert not folder.exists()


def test_a_number_used_again_by_another_process_is_spared(sleeper) -> None:
    identity = reaper.identity(sleeper.pid)
    assert identity is not None
    pid, start = identity.split(":")
    reaper.end([f"{pid}:{int(start) - 1}", f"{pid}:"])
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(timeout=0.2)
    reaper.end([identity])
    assert sleeper.wait(timeout=100) == -signal.SIGKILL


def test_descendants_of_a_number_used_again_are_spared(folder, watcher, spawned) -> None:
    other = subprocess.Popen(["bash", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    child = int(other.stdout.readline())
    spawned += [identity for pid in (other.pid, child) if (identity := reaper.identity(pid))]
    watcher.communicate(f"{folder}\n{other.pid}:1\n", timeout=100)
    assert not folder.exists()
    assert running(child)


def test_an_identity_is_of_the_process_and_gone_with_it(sleeper) -> None:
    first = reaper.identity(sleeper.pid)
    assert first == reaper.identity(sleeper.pid) != reaper.identity(os.getpid())
    sleeper.kill()
    sleeper.wait()
    assert reaper.identity(sleeper.pid) is None


def test_descendants_are_all_generations_but_not_the_process_itself(spawned) -> None:
    child = subprocess.Popen(["bash", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    spawned += [identity for pid in (child.pid, grandchild) if (identity := reaper.identity(pid))]
    found = reaper.descendants(os.getpid())
    assert {child.pid, grandchild} <= set(found)
    assert os.getpid() not in found
    assert reaper.descendants(child.pid) == [grandchild]
    assert reaper.descendants(grandchild) == []


def test_a_server_of_ray_that_ends_before_the_driver_is_named(folder, watcher, tmp_path) -> None:
    """A driver that cannot reach its raylet ends at once, without a word."""

    def watched() -> bool:
        names = []
        for descriptor in Path(f"/proc/{watcher.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed by now
                names.append(str(descriptor.readlink()))
        return any("pidfd" in name for name in names)

    program = tmp_path / "raylet"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "1000"]) as raylet:
        assert watcher.stdin is not None
        watcher.stdin.write(f"{folder}\n{reaper.identity(raylet.pid)}\n")
        watcher.stdin.flush()
        try:
            wait_until(watched, "the reaper watches it")
        finally:
            raylet.kill()
    time.sleep(0.1)
    output, _ = watcher.communicate(timeout=100)
    assert output.startswith("dagrl run: Ray's raylet was killed") and "goes on from the last checkpoint" in output
    assert not folder.exists()
