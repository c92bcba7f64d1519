"""The Ray cluster that a run joins, and the error if it cannot."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dagrl.orchestrator.cluster import ray_cluster
from dagrl.orchestrator.cluster.ray_cluster import _check_home, cluster, connect, running_here
from dagrl.workers.errors import RunError


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which `ray start` notes its address."""
    path = tmp_path / "ray_current_cluster"
    monkeypatch.setattr(ray_cluster, "RUNNING_CLUSTER", path)
    return path


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is held, so that no other process listens there."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


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


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o444])
def test_a_file_of_the_user_that_others_cannot_write_counts(noted: Path, mode: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        noted.write_text(f"127.0.0.1:{listening.getsockname()[1]}")
        noted.chmod(mode)
        assert running_here() == noted.read_text()


OTHER = """
import os, socket, sys
os.setuid(65534)
host = sys.argv[1]
family = socket.AF_INET6 if ":" in host else socket.AF_INET
server = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can listen as another user")
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "::1"])
def test_an_address_at_which_another_user_listens_does_not_count(noted: Path, host: str) -> None:
    command = [sys.executable, "-c", OTHER, host]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin and other.stdout
        noted.write_text(f"{'::1' if host == '::1' else '127.0.0.1'}:{int(other.stdout.readline())}")
        assert running_here() is None
        other.stdin.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_an_address_at_which_the_user_listens_counts(noted: Path, host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::") as listening:
        noted.write_text(f"127.0.0.1:{listening.getsockname()[1]}")
        assert running_here() == noted.read_text()


def test_a_system_without_ipv6_has_one_table_of_listeners(noted: Path, monkeypatch) -> None:
    read = Path.read_text

    def missing(path: Path, *arguments: object, **options: object) -> str:
        if path == Path("/proc/net/tcp6"):
            raise FileNotFoundError(path)
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", missing)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        noted.write_text(f"127.0.0.1:{listening.getsockname()[1]}")
        assert running_here() is not None


def test_a_file_that_others_can_write_does_not_count(noted: Path, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        noted.write_text(f"127.0.0.1:{listening.getsockname()[1]}")
        for mode in (0o666, 0o664, 0o646):
            noted.chmod(mode)
            assert running_here() is None
        noted.chmod(0o644)
        assert running_here() is not None
        own = os.getuid()
        monkeypatch.setattr("os.getuid", lambda: own + 1)
        assert (running_here() is None) == (own != 0)
        real = noted.rename(noted.with_name("elsewhere"))
        noted.symlink_to(real)
        assert running_here() is None
        noted.unlink()
        os.mkfifo(noted)
        assert running_here() is None


def test_a_file_of_another_user_does_not_count(noted: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        noted.write_text(f"127.0.0.1:{listening.getsockname()[1]}")
        os.chown(noted, 12345, 12345)
        assert running_here() is None


@pytest.mark.parametrize("address", ["192.0.2.77:6379", "203.0.113.5:6379", "ray://127.0.0.1:1", "auto", "host", ":1"])
def test_an_address_of_another_machine_does_not_count_nor_is_it_asked(noted: Path, address: str, monkeypatch) -> None:
    monkeypatch.setattr("dagrl.orchestrator.cluster.ray_cluster.connect", pytest.fail)
    noted.write_text(address)
    assert running_here() is None


def test_the_token_of_ray_is_the_user_s_alone(tmp_path: Path, monkeypatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"
    _check_home()
    first = token.read_text()
    assert len(first) == 64 and token.stat().st_mode & 0o777 == 0o600
    token.chmod(0o644)  # as Ray leaves it
    _check_home()
    assert token.read_text() == first and token.stat().st_mode & 0o777 == 0o600


def test_a_value_that_is_no_address_is_passed_to_ray() -> None:
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

    monkeypatch.setattr("dagrl.orchestrator.cluster.ray_cluster._started", started)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        noted.write_text(f"127.0.0.1:{listening.getsockname()[1]}\n")
        monkeypatch.setenv("RAY_ADDRESS", "local")
        assert refusal(SimpleNamespace(), tmp_path).cause == "one of its own"


def test_a_run_that_joins_what_it_has_found_here_says_so(noted: Path, tmp_path, monkeypatch) -> None:
    def joined(*arguments: object, found_here: bool) -> None:
        assert found_here
        raise RunError("another's")

    monkeypatch.setattr("dagrl.orchestrator.cluster.ray_cluster._joined", joined)
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
from dagrl.orchestrator.cluster import ray_cluster
ray_cluster.connect = lambda address: None
ray_cluster._agree_on_token = lambda address, **options: None
ray = SimpleNamespace(init=lambda **options: None)
with ray_cluster._joined(ray, "127.0.0.1:{closed_port}", found_here=False):
    os._exit(1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert f"the cluster at 127.0.0.1:{closed_port} is gone" in done.stderr and "last checkpoint" in done.stderr


def test_a_cluster_with_rays_client_port_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    error = refusal(SimpleNamespace(), tmp_path)
    assert "the address of a Ray client server" in error.cause and "HOST:PORT" in error.hint


def test_a_cluster_of_another_version_is_a_sentence_of_one_line(tmp_path, monkeypatch) -> None:
    import ray

    def init(**options: object) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.1.0\n    Python: 3.12.1\n")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr("dagrl.orchestrator.cluster.ray_cluster._agree_on_token", lambda *arguments, **options: None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        error = refusal(SimpleNamespace(), tmp_path)
    assert error.cause == (
        f"the Ray cluster at {address} cannot be joined: "
        "Version mismatch: The cluster was started with: Ray: 2.1.0 Python: 3.12.1"
    )
