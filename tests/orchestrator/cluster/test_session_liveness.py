"""A process of Ray that ends is noticed, on real processes in the place of Ray's."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray._private import worker

from dagrl.orchestrator.cluster.session import while_ray_lives
from dagrl.workers.errors import RayLostError, RunError


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A control store that would go on, with a log."""
    (tmp_path / "gcs_server.out").write_text("what it said last\n")
    with subprocess.Popen(["sleep", "1000"]) as process:
        started = {"gcs_server": [SimpleNamespace(process=process)]}
        node = SimpleNamespace(all_processes=started, get_logs_dir_path=lambda: str(tmp_path))
        monkeypatch.setattr(worker, "_global_node", node)
        yield process
        process.kill()


def test_a_killed_server_ends_a_wait_and_is_named(server: subprocess.Popen) -> None:
    async def wait() -> None:
        async with while_ray_lives():
            server.kill()
            await asyncio.sleep(1000)

    with pytest.raises(RayLostError, match=r"the process was killed \(SIGKILL\)") as caught:
        asyncio.run(wait())
    assert caught.value.worker == f"Ray's gcs_server (pid {server.pid})"
    assert "goes on from the last checkpoint" in caught.value.hint
    assert "what it said last" in caught.value.details


def test_it_is_the_cause_of_other_failures(server: subprocess.Popen) -> None:
    async def fail() -> None:
        async with while_ray_lives():
            server.kill()
            server.wait()
            raise RunError("a worker cannot be reached")

    with pytest.raises(RayLostError):
        asyncio.run(fail())


@pytest.mark.usefixtures("server")
def test_failures_and_interrupts_beside_a_ray_that_lives_stay_what_they_are() -> None:
    async def fail(failure: BaseException) -> None:
        async with while_ray_lives():
            raise failure

    for failure in (RunError("something else"), asyncio.CancelledError()):
        with pytest.raises(type(failure)) as caught:
            asyncio.run(fail(failure))
        assert not isinstance(caught.value, RayLostError)


def test_a_ray_that_was_joined_has_no_processes_here(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> int:
        async with while_ray_lives():
            return 1

    monkeypatch.setattr(worker, "_global_node", None)
    assert asyncio.run(work()) == 1
