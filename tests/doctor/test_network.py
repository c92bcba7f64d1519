"""Checks of Ray and of the rank of a machine."""

from __future__ import annotations

import socket

import pytest

from dagrl.doctor import network
from dagrl.doctor.findings import Verdict

JOB = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "localhost"}


def found(name: str) -> tuple[Verdict, str]:
    return next((each.verdict, each.text) for each in network.network() if each.name == name)


def test_without_variables_a_run_starts_its_own_ray() -> None:
    assert {each.verdict for each in network.network()} == {Verdict.OK}
    assert found("PET_* variables")[1] == "none for several machines: `dagrl launch` is `dagrl run`"


def test_a_cluster_that_a_run_would_join_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "running_here", lambda: "10.0.0.1:6379")
    assert found("Ray") == (Verdict.HINT, "a cluster runs on this machine at 10.0.0.1:6379: `dagrl run` joins it")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    assert found("Ray") == (Verdict.HINT, "RAY_ADDRESS is 10.0.0.9:6379: `dagrl run` joins that cluster")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert found("Ray")[0] is Verdict.OK


def test_an_address_that_serves_clients_or_is_silent_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setenv("RAY_ADDRESS", "ray://h:10001")
    verdict, text = found("Ray")
    assert verdict is Verdict.MISSING and "serves Ray clients" in text
    monkeypatch.setattr(network, "connect", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    verdict, text = found("Ray")
    assert verdict is Verdict.MISSING and "does not answer (Connection refused); unset it" in text


def test_the_rank_of_a_job_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        for name, value in {**JOB, "PET_MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        verdict, text = found("PET_* variables")
        assert verdict is Verdict.MISSING and "the port is taken" in text
    assert found("PET_* variables") == (Verdict.OK, f"rank 0 of 2 machines, rank 0 at localhost:{port}")
    monkeypatch.setenv("PET_MASTER_ADDR", "no-such-host.invalid")
    verdict, text = found("PET_* variables")
    assert verdict is Verdict.MISSING and "the name no-such-host.invalid does not resolve" in text
    monkeypatch.setenv("PET_NNODES", "two")
    verdict, text = found("PET_* variables")
    assert verdict is Verdict.MISSING and "PET_NNODES is `two`" in text
