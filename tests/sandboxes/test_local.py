"""Local sandboxes are confined, and end with their owner."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dagrl.environments.failures import EnvironmentFailedError
from tests.helpers.sandbox_processes import processes_of

HOLDER = """
import asyncio, sys
from dagrl.sandboxes.pool import load_provider
from dagrl.sandboxes.sandbox import SandboxRequest

async def main(label, count):
    provider = load_provider("local", label, {})
    slots = asyncio.Semaphore(16)
    async def start():
        async with slots:
            sandbox = await provider.start(SandboxRequest(memory_mib=256, lifetime_s=600))
            await sandbox.exec("sleep 1000 & (sleep 1000 & sleep 1000) &")
            return sandbox
    held = await asyncio.gather(*(start() for _ in range(count)))
    print("ready", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def test_a_program_sees_neither_files_of_the_user_nor_a_network(local_case, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    (tmp_path / "secret").chmod(0o644)

    async def test(sandbox) -> None:
        await sandbox.exec(f"ln -s {tmp_path}/secret link")
        for path in (f"{tmp_path}/secret", "link", "/proc/self/environ"):
            assert (await sandbox.exec(["cat", path])).exit_code == 1
        # The host does not follow a link either.
        with pytest.raises((FileNotFoundError, EnvironmentFailedError)):
            await sandbox.read("link")
        assert (await sandbox.exec(f"echo over >{tmp_path}/secret")).exit_code != 0
        connect = "import socket; socket.create_connection(('127.0.0.1', 1))"
        done = await sandbox.exec([sys.executable, "-c", connect])
        assert "PermissionError" in done.stderr
        assert "denied" in (await sandbox.exec(f"kill {os.getpid()}")).stderr.lower().replace("not permitted", "denied")

    local_case.use(test)
    assert (tmp_path / "secret").read_text() == "key"


def test_limits_of_memory_and_processes_hold(local_case) -> None:
    async def test(sandbox) -> None:
        assert "MemoryError" in (await sandbox.exec([sys.executable, "-c", "bytearray(600 << 20)"])).stderr
        # Several processes below the limit are above it together.
        hog = f"{sys.executable} -c 'import time; held = bytearray(300 << 20); time.sleep(60)'"
        done = await sandbox.exec(f"{hog} & {hog} & {hog} & wait %1; echo $?", timeout_s=50)
        assert done.exit_code == 137 or done.stdout == "137\n"
        crowd = await sandbox.exec("i=0; while [ $i -lt 400 ]; do sleep 60 & i=$((i + 1)); done; wait", timeout_s=50)
        assert crowd.exit_code == 137
        assert (await sandbox.exec("echo alive")).stdout == "alive\n"
        assert (
            await sandbox.exec([sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"])
        ).stdout == "1\n"

    local_case.use(test, cpus=0.5)


def test_without_confinement_it_is_a_plain_process(local_case) -> None:
    async def run() -> None:
        provider = type(local_case)("local", {"confined": False}).provider()
        with pytest.raises(EnvironmentFailedError, match="network"):
            await provider.start(local_case.request())
        sandbox = await provider.start(local_case.request(network=True))
        assert (await sandbox.exec("echo '#!/bin/sh\necho ran' >a && chmod +x a && ./a")).stdout == "ran\n"
        await sandbox.close()
        await provider.close()

    asyncio.run(run())


def test_its_time_ends_a_sandbox(local_case) -> None:
    async def test(sandbox) -> None:
        with pytest.raises(EnvironmentFailedError, match="ended") as raised:
            await sandbox.exec("sleep 100", timeout_s=50)
        assert raised.value.failure == "exec"

    local_case.use(test, lifetime_s=2.0)


def test_a_killed_owner_leaves_no_process_and_no_folder(local_case) -> None:
    label = f"test-killed-{os.getpid()}"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, label, "20"], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    kept = processes_of(label)
    assert len(kept) >= 20 * 4
    # Half of the first processes die as well, so that their commands have no parent.
    inits = [pid for pid in kept if b"local_init" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for pid in [holder.pid, *inits[::2]]:
        os.kill(pid, signal.SIGKILL)
    holder.wait()

    async def sweep() -> int:
        provider = local_case.provider(label)
        try:
            return await provider.sweep()
        finally:
            await provider.close()

    assert asyncio.run(sweep()) >= 10
    end = time.monotonic() + 30
    while processes_of(label) and time.monotonic() < end:
        time.sleep(0.1)
    assert not processes_of(label)
    assert not [*Path(os.environ.get("TMPDIR", "/tmp")).glob(f"dagrl-sandboxes-*/{label}/*")]
