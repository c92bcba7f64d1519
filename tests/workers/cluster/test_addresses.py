"""Which Ray a run would join, and what is said where it cannot."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dagrl.workers.cluster import ray_cluster
from dagrl.workers.cluster.ray_cluster import cluster, connect, running_here
from dagrl.workers.errors import RunError


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which `ray start` notes its address."""
    path = tmp_path / "ray_current_cluster"
    monkeypatch.setattr(ray_cluster, "RUNNING_CLUSTER", path)
    return path


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def test_a_cluster_that_answers_is_joined(noted: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        noted.write_text(f"127.0.0.1:{listening.getsockname()[1]}\n")
        assert running_here() == noted.read_text().strip()


def test_one_that_was_killed_is_no_longer_there_though_its_file_is(noted: Path, closed_port: int) -> None:
    assert running_here() is None
    noted.write_text(f"127.0.0.1:{closed_port}\n")
    assert running_here() is None
    noted.write_text("")
    assert running_here() is None


def test_what_is_no_address_is_left_to_ray() -> None:
    connect("auto")
    connect("local:")
    connect("head:²")


def refusal(pipeline, tmp_path: Path) -> RunError:
    with pytest.raises(RunError) as caught, cluster(pipeline, tmp_path, pytest.fail):
        pass
    return caught.value


def test_a_run_may_keep_to_itself(noted: Path, tmp_path, monkeypatch) -> None:
    def started(*arguments: object) -> None:
        raise RunError("one of its own")

    monkeypatch.setattr("dagrl.workers.cluster.ray_cluster._started", started)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        noted.write_text(f"127.0.0.1:{listening.getsockname()[1]}\n")
        monkeypatch.setenv("RAY_ADDRESS", "local")
        assert refusal(SimpleNamespace(), tmp_path).cause == "one of its own"


def test_a_run_that_joins_what_it_has_found_here_says_so(noted: Path, tmp_path, monkeypatch) -> None:
    def joined(*arguments: object, found_here: bool) -> None:
        assert found_here
        raise RunError("another's")

    monkeypatch.setattr("dagrl.workers.cluster.ray_cluster._joined", joined)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        noted.write_text(f"{address}\n")
        with pytest.raises(RunError, match="another's"), cluster(SimpleNamespace(), tmp_path, said.append):
            pass
    (told,) = said
    assert address in told and "RAY_ADDRESS=local" in told


def test_a_driver_that_ray_ends_does_not_vanish_without_a_word(closed_port: int) -> None:
    code = f"""
import os
from types import SimpleNamespace
from dagrl.workers.cluster import ray_cluster
ray_cluster.connect = lambda address: None
ray_cluster._agree_on_token = lambda address, **options: None
ray = SimpleNamespace(init=lambda **options: None)
with ray_cluster._joined(ray, "127.0.0.1:{closed_port}", found_here=False):
    os._exit(1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert f"the cluster at 127.0.0.1:{closed_port} is gone" in done.stderr and "last checkpoint" in done.stderr


def test_where_rays_client_is_served_nobody_can_take_part(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    error = refusal(SimpleNamespace(), tmp_path)
    assert "the address of a Ray client server" in error.cause and "HOST:PORT" in error.hint


def test_a_cluster_of_another_version_is_a_sentence_of_one_line(tmp_path, monkeypatch) -> None:
    import ray

    def init(**options: object) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.1.0\n    Python: 3.12.1\n")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr("dagrl.workers.cluster.ray_cluster._agree_on_token", lambda *arguments, **options: None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        error = refusal(SimpleNamespace(), tmp_path)
    assert error.cause == (
        f"the Ray cluster at {address} cannot be joined: "
        "Version mismatch: The cluster was started with: Ray: 2.1.0 Python: 3.12.1"
    )
