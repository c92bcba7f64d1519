"""Ports that no outgoing connection takes while a process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.workers import listener


@pytest.fixture
def local_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the first and the last port of outgoing connections."""
    file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(listener, "_LOCAL_PORTS", file)
    return file


def test_the_port_is_below_those_of_outgoing_connections(local_ports: Path) -> None:
    local_ports.write_text("32768\t60999\n")
    for _ in range(20):
        with listener.listen("127.0.0.1") as found:
            assert 20000 <= found.getsockname()[1] < 32768


def test_a_port_that_is_taken_is_passed_over(local_ports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local_ports.write_text("32768\t60999\n")
    with listener.listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        local_ports.write_text(f"{port + 1}\t60999\n")
        monkeypatch.setattr(listener, "_FIRST", port)
        with listener.listen("127.0.0.1") as other:
            assert other.getsockname()[1] != port


def test_any_port_serves_where_all_are_for_outgoing_connections(local_ports: Path) -> None:
    local_ports.write_text("1024\t65535\n")
    with listener.listen("127.0.0.1") as found:
        assert found.getsockname()[1] > 0
