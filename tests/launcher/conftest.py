"""Several hosts on one machine: network namespaces on a bridge, each with a host name and an address of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

JOB_TIMEOUT_S = 280
_NETWORKS = count(1)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=100)


@dataclass
class Host:
    """One host: what runs there is in its namespace, and has files of its own."""

    name: str
    namespace: str
    link: str
    address: str
    temporary: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="dh", dir="/tmp")))

    def start(self, command: list[str], variables: dict[str, str], output: Path) -> subprocess.Popen:
        """Run a command here."""
        inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name, *command]
        with output.open("a") as printed:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *inside],
                stdout=printed,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**variables, "TMPDIR": str(self.temporary)},
                start_new_session=True,
            )

    def cut_off(self) -> None:
        """Pull its cable: nothing goes in or out, and nobody is told."""
        ip("link", "set", self.link, "down")

    def plug_in(self) -> None:
        """Put the cable back."""
        ip("link", "set", self.link, "up")

    def processes(self) -> list[str]:
        """What runs here."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, timeout=100)
        return listed.stdout.split()

    def left_behind(self) -> list[str]:
        """Processes and files that are still here after a moment to end."""
        deadline = time.monotonic() + 15
        while (left := [*self.processes(), *map(str, self.temporary.iterdir())]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


class Network:
    """Hosts that can reach each other."""

    def __init__(self) -> None:
        # Interface names have at most 15 characters, and must be ours alone.
        number, self._mark = next(_NETWORKS), f"dn{os.getpid() % 100000}x"
        self._bridge = f"{self._mark}{number}b"
        self._subnet = f"10.{70 + os.getpid() % 100}.{number}"
        self._prefix = f"{self._mark}{number}"
        ip("link", "add", self._bridge, "type", "bridge")
        ip("link", "set", self._bridge, "up")
        self.hosts: list[Host] = []

    def add(self) -> Host:
        """One more host."""
        number = len(self.hosts)
        namespace = link = f"{self._prefix}n{number}"
        host = Host(f"node{number}", namespace, link, f"{self._subnet}.{number + 1}")
        ip("netns", "add", namespace)
        self.hosts.append(host)
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("link", "set", link, "master", self._bridge, "up")
        ip("-n", namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", namespace, "link", "set", device, "up")
        return host

    def close(self) -> None:
        """End all that runs there, and take everything down."""
        for host in self.hosts:
            for pid in host.processes():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            subprocess.run(["ip", "netns", "del", host.namespace], check=False, capture_output=True, timeout=100)
            shutil.rmtree(host.temporary, ignore_errors=True)
        subprocess.run(["ip", "link", "del", self._bridge], check=False, capture_output=True, timeout=100)


class Job:
    """`dagrl launch` on some hosts."""

    def __init__(self, hosts: list[Host], pipeline: Path, run_dir: Path, outputs: Path) -> None:
        self.hosts = hosts
        self.run_dir = run_dir
        self._pipeline = pipeline
        self._outputs = outputs
        self.processes: dict[int, subprocess.Popen] = {}

    def start(self, rank: int, *overrides: str, **changed: str) -> None:
        """Start a rank on the host of its number, with variables as torchrun's unless they are `changed`."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PET_"))}
        variables |= {
            "PET_NNODES": str(len(self.hosts)),
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": self.hosts[0].address,
            "PET_MASTER_PORT": "29511",
            # As few of Ray's processes as can be.
            "PET_NPROC_PER_NODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        variables |= changed
        command = [sys.executable, "-m", "dagrl", "launch", str(self._pipeline), "--run-dir", str(self.run_dir)]
        self.processes[rank] = self.hosts[rank].start([*command, *overrides], variables, self._file(rank))

    def start_all(self, *overrides: str) -> None:
        """Start every rank."""
        for rank in range(len(self.hosts)):
            self.start(rank, *overrides)

    def output(self, rank: int) -> str:
        """What a rank has printed."""
        return self._file(rank).read_text()

    def codes(self) -> list[int]:
        """The exit codes, by rank, of those that were started."""
        return [self.code(rank) for rank in sorted(self.processes)]

    def code(self, rank: int) -> int:
        """The exit code of a rank."""
        try:
            return self.processes[rank].wait(JOB_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"rank {rank} still runs after {JOB_TIMEOUT_S} s:\n{self.everything()}")

    def wait_for(self, rank: int, text: str) -> None:
        """Until a rank has printed that."""
        deadline = time.monotonic() + JOB_TIMEOUT_S
        while text not in self.output(rank):
            assert self.processes[rank].poll() is None, f"ended without `{text}`:\n{self.everything()}"
            assert time.monotonic() < deadline, f"no `{text}` within {JOB_TIMEOUT_S} s:\n{self.everything()}"
            time.sleep(0.1)

    def everything(self) -> str:
        """All outputs, for messages."""
        return "\n".join(f"--- rank {rank}\n{self.output(rank)}" for rank in sorted(self.processes))

    def _file(self, rank: int) -> Path:
        return self._outputs / f"rank{rank}.out"


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where this machine allows no network namespaces."""
    if shutil.which("ip") is None:
        pytest.skip("needs `ip` (iproute2)")
    trial = f"dn{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True, timeout=100)
    if made.returncode:
        pytest.skip(f"needs network namespaces: {made.stderr.strip()}")
    ip("netns", "del", trial)


@pytest.fixture
def make_job(namespaces, tmp_path: Path, lab) -> Iterator[Callable[..., Job]]:
    """Number of hosts and pipeline -> a job."""
    networks = []

    def make(hosts: int, pipeline: dict) -> Job:
        networks.append(Network())
        path = lab.write_pipeline(tmp_path, pipeline)
        return Job([networks[-1].add() for _ in range(hosts)], path, tmp_path / "run", tmp_path)

    yield make
    for network in networks:
        network.close()
