"""Joining a running Ray, requesting too many resources, and the processes of a Ray that dagrl starts."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from dagrl.orchestrator.cluster.ray_cluster import _check_memory
from dagrl.workers.errors import RunError

pytestmark = pytest.mark.slow

RAY = Path(sys.executable).parent / "ray"
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}


@pytest.fixture(scope="module")
def running_ray(tmp_path_factory):
    """A Ray with two CPUs that dagrl has not started; yields its address."""
    with started_ray(tmp_path_factory.mktemp("r", numbered=False), NO_TOKEN) as address:
        yield address


@contextmanager
def started_ray(folder: Path, settings: dict[str, str]) -> Iterator[str]:
    """Start Ray with two CPUs and these variables, on a port that it chooses and prints."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **settings}
    start = ["start", "--head", "--port=0", "--num-cpus=2", f"--temp-dir={folder}", "--include-dashboard=false"]
    start += ["--object-store-memory=134217728", "--node-ip-address=127.0.0.1", "--block"]
    # In the foreground, so that it can be ended alone: `ray stop` would end every Ray of the machine.
    with (folder / "printed").open("w") as printed:
        process = subprocess.Popen([RAY, *start], env=environment, stdout=printed, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        # Asking takes a second of the processor, and reading what it prints does not.
        while not (port := re.search(r"--address='[^']*:(\d+)'", told := (folder / "printed").read_text())) or (
            "2.0 CPU" not in status(f"127.0.0.1:{port[1]}", settings)
        ):
            assert process.poll() is None and time.monotonic() < deadline, told
            time.sleep(0.5)
        yield f"127.0.0.1:{port[1]}"
    finally:
        process.terminate()
        process.wait(timeout=240)


def test_a_running_ray_is_joined_and_left_as_it_was(lab, running_ray, tmp_path):
    pipeline = lab.tiny_pipeline()
    pipeline["run"] = {"steps": 1}
    run = lab.start(lab.write_pipeline(tmp_path, pipeline), tmp_path / "run", ray_address=running_ray)
    assert run.wait() == 0, run.output
    assert run.left_behind() == []
    # The cluster's own account of its resources lags behind by some seconds.
    deadline = time.monotonic() + 30
    while "0.0/2.0 CPU" not in (account := status(running_ray)):
        assert time.monotonic() < deadline, account
        time.sleep(1)
    assert kept_calls(running_ray) <= 1, "Ray's control store keeps calls: it grows with every step"


def wait_until(run, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert run.process.poll() is None and time.monotonic() < deadline, run.output
        time.sleep(0.1)


def kept_calls(address: str) -> int:
    """Tasks, calls of actors among them, of which Ray's control store keeps events; the driver itself is one."""
    program = f"""
import ray
from ray._private.state import state
ray.init(address={address!r}, log_to_driver=False, logging_level="ERROR", namespace="other")
own = ray.get_runtime_context().get_job_id()
print(sum(each.job_id.hex() != own for each in state._get_all_task_events()))
"""
    environment = {**os.environ, **NO_TOKEN}
    command = [sys.executable, "-c", program]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=True).stdout)


def status(address: str, settings: dict[str, str] = NO_TOKEN) -> str:
    """The output of `ray status`."""
    environment = {**os.environ, **settings}
    command = [RAY, "status", f"--address={address}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment).stdout


def test_a_pipeline_that_asks_for_more_than_there_is_says_so(lab, running_ray, tmp_path):
    pipeline = lab.tiny_pipeline()
    pipeline["groups"]["train"] = {"cpus_per_node": 8}
    run = lab.start(lab.write_pipeline(tmp_path, pipeline), tmp_path / "run", ray_address=running_ray)
    assert run.wait() == 1
    assert (
        "the groups ask for train 8 CPU slots on one machine, rollout 1 CPU slot on one machine; there is" in run.output
    )
    assert ") with 2 CPU slots" in run.output
    assert "Traceback" not in run.output


def test_a_group_with_min_nodes_gains_and_loses_a_machine(lab, running_ray, tmp_path):
    pipeline = lab.tiny_pipeline()
    pipeline["groups"]["rollout"] = {"cpus_per_node": 1, "nodes": 2, "min_nodes": 1}
    pipeline["run"] |= {"steps": 10000, "save_every": None, "validate_every": None}
    run = lab.start(lab.write_pipeline(tmp_path, pipeline), tmp_path / "run", ray_address=running_ray)
    run.wait_for_step(1)
    join = [RAY, "start", f"--address={running_ray}", "--num-cpus=1", "--object-store-memory=134217728", "--block"]
    with subprocess.Popen(join, env=os.environ | NO_TOKEN, stdout=subprocess.DEVNULL, start_new_session=True) as other:
        try:
            wait_until(run, lambda: "generator/1 joined: generator has 2 of 2 ranks" in run.output)
            run.wait_for_step(run.metrics()[-1]["step"] + 3)
            worker = json.loads((run.folder / "workers.json").read_text())["generator/1"]
        finally:
            for process in [*psutil.Process(other.pid).children(recursive=True), other]:
                process.kill()
    wait_until(run, lambda: "generator/1 is lost: " in run.output)
    run.wait_for_step(run.metrics()[-1]["step"] + 3)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == [*range(1, len(metrics) + 1)]
    missing = [int(line["run/missing_ranks"]) for line in metrics]
    assert [number for number, _ in itertools.groupby(missing)] == [1, 0, 1]
    assert {line["run/restarts"] for line in metrics} == {0}
    assert not Path(f"/proc/{worker['pid']}").exists()


def test_an_address_without_a_server_is_named(lab, tmp_path):
    pipeline = lab.write_pipeline(tmp_path, lab.tiny_pipeline())
    run = lab.start(pipeline, tmp_path / "run", ray_address="127.0.0.1:9")
    assert run.wait() == 1
    assert "no Ray cluster answers at 127.0.0.1:9" in run.output
    assert "Traceback" not in run.output


JOIN = """
import sys
from pathlib import Path

from dagrl.config.loading.loader import load_pipeline
from dagrl.orchestrator.cluster import ray_cluster
from dagrl.workers.errors import RunError

ray_cluster.RUNNING_CLUSTER = Path(sys.argv[2])
try:
    with ray_cluster.cluster(load_pipeline(Path(sys.argv[1])).pipeline, Path("logs"), print) as ray:
        print(ray.get(ray.remote(lambda: "it works").remote()))
except RunError as error:
    print(error)
"""


def test_a_ray_that_asks_for_a_token_gets_it_if_it_was_found_here(lab, tmp_path, tmp_path_factory):
    """A cluster that requires a token, as `ray start` does if ``~/.ray/auth_token`` exists."""
    file = lab.write_pipeline(tmp_path, lab.tiny_pipeline())
    noted, token = tmp_path / "ray_current_cluster", tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    theirs = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_MODE")}
    environment |= {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}

    def join(**settings: str) -> str:
        command = [sys.executable, "-c", JOIN, str(file), str(noted)]
        ran = subprocess.run(command, env=environment | settings, capture_output=True, text=True, timeout=240)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    with started_ray(tmp_path_factory.mktemp("t", numbered=False), theirs) as address:
        noted.write_text(address)
        assert join().endswith("it works\n")
        assert join(RAY_ADDRESS=address) == f"the Ray cluster at {address} asks for a token\n"
        other = join(RAY_ADDRESS=address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="fedcba9876543210" * 4)
        assert other == f"the Ray cluster at {address} does not take this token\n"


def test_more_slots_than_the_machine_has_memory_for_are_refused_before_any_starts() -> None:
    _check_memory(4, 1)
    asked = r"each of 1000000 CPU slots and 1 host workers .* take at least 100000 GiB of memory, and \d+ GiB are free"
    with pytest.raises(RunError, match=asked):
        _check_memory(1_000_000, 1)
    with pytest.raises(RunError, match="each of 1 CPU slots and 4096000 host workers"):
        _check_memory(1, 4_096_000)


NO_HOME = """
import os, sys
from pathlib import Path
from dagrl.orchestrator.cluster.ray_cluster import cluster
from dagrl.workers.errors import RunError

if sys.argv[1] != "nobody":
    os.environ["HOME"] = sys.argv[1]
else:
    os.environ.pop("HOME", None)
    os.setuid(54321)
try:
    with cluster(None, Path(sys.argv[2]), print):
        raise AssertionError("Ray has started")
except RunError as error:
    print(error.cause, error.hint, sep="; ")
assert "ray" not in sys.modules
"""


@pytest.mark.parametrize("home", ["/proc/nohome", "/dev/null", "/proc", "nobody"])
def test_an_unwritable_home_is_reported_before_ray_starts(tmp_path, home) -> None:
    if home == "nobody" and os.getuid():
        pytest.skip("needs root to become another user")
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in names} | {"RAY_ADDRESS": "local"}
    command = [sys.executable, "-c", NO_HOME, home, str(tmp_path / "logs")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("Ray keeps its token in ")
    assert ran.stdout.endswith("; set HOME to a folder that can be written\n"), ran.stdout


LATE_ONCE = """
import os
import signal
import sys
import threading
import time
from pathlib import Path

import ray
from ray._private.node import Node

from dagrl.config.loading.loader import load_pipeline
from dagrl.orchestrator.cluster import reaper
from dagrl.orchestrator.cluster.ray_cluster import cluster

start, folders, stopped = Node.start_ray_processes, [], []


def late_at_first(node):
    folders.append(node.get_session_dir_path())
    if len(folders) == 1:
        # Its control store runs already.
        assert reaper.started_with(folders[0]), "nothing has started yet"
        raise Exception("the current node timed out during startup")
    threading.Thread(target=stop_the_agent, daemon=True).start()
    start(node)


def command_lines():
    for pid in reaper.descendants(os.getpid()):
        try:
            yield pid, Path(f"/proc/{pid}/cmdline").read_text().split(chr(0))
        except OSError:
            pass


def stop_the_agent():
    # Busy machines are as slow as that.
    while not stopped:
        for pid, words in command_lines():
            if any(word.endswith("runtime_env/agent/main.py") for word in words):
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
                break
        time.sleep(0.01)


Node.start_ray_processes = late_at_first
pipeline = load_pipeline(Path(sys.argv[1])).pipeline
with cluster(pipeline, Path(sys.argv[2]), print) as connected:
    assert not reaper.started_with(folders[0]), "processes of the first are left"
    print(connected.get(connected.remote(lambda: "it works").remote()))
    programs = " ".join(word for _, words in command_lines() for word in words[:4])
    assert "gcs_server" in programs, programs
    unneeded = "dashboard/dashboard.py", "log_monitor.py", "monitor.py"
    assert not any(name in programs for name in unneeded), programs
    print("while an agent was stopped:", len(stopped))
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
"""


def test_a_ray_that_starts_too_late_is_started_once_more_and_waits_for_no_agent(lab, tmp_path) -> None:
    file = lab.write_pipeline(tmp_path, lab.tiny_pipeline())
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "RAY_ADDRESS": "local"
    }
    command = [sys.executable, "-c", LATE_ONCE, str(file), str(tmp_path / "logs")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert ran.returncode == 0, ran.stderr
    assert "Ray did not start, and is started once more: the current node timed out" in ran.stdout
    assert ran.stdout.endswith("it works\nwhile an agent was stopped: 1\n")


PORTS = """
import os
import sys
from pathlib import Path

import psutil
import ray
from dagrl.orchestrator.cluster import ray_cluster
from dagrl.orchestrator.cluster.session import session_folder

with session_folder() as folder:
    ray_cluster._start(ray, 1, folder)
    ray.get(ray.remote(lambda: None).remote())
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    for process in processes:
        for each in process.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN:
                print(each.laddr.ip, process.name())
    ray.shutdown()
"""


def test_no_other_machine_reaches_the_ray_of_a_run():
    ran = subprocess.run([sys.executable, "-c", PORTS], capture_output=True, text=True, timeout=240)
    listening = [line.split()[0] for line in ran.stdout.splitlines()]
    assert ran.returncode == 0 and len(listening) > 3, ran.stderr
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
