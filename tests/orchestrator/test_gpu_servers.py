"""Servers of more than one kind of parallelism, or on two machines, on two GPUs: each takes weights and is on policy.

The machines are two of Ray's on one host, a GPU each: servers meet over its network as they do between hosts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dagrl.backends.environments import made_environments
from dagrl.workers.listener import listen

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4
_START_S = 60.0
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "pipeline stages": ("two_gpus_colocated_tp2_to_tp1", {"pp_size": 2}, False),
    "attention by data": (
        "two_gpus_colocated_experts_ep2_to_ep2",
        {"dp_size": 2, "enable_dp_attention": True, "ep_size": 1},
        False,
    ),
    "two machines": ("two_gpus_colocated_tp2_to_tp2", {}, True),
    "vLLM, tensor parallel": ("two_gpus_colocated_tp2_to_tp2_vllm", {}, False),
    "vLLM, experts with routes, weights over NCCL": ("two_gpus_apart_experts_vllm_replayed", {}, False),
    "vLLM, experts apart": ("two_gpus_colocated_experts_ep2_to_ep2_vllm", {}, False),
    "vLLM, attention by data": (
        "two_gpus_colocated_experts_ep2_to_ep2_vllm",
        {"tensor_parallel_size": 1, "data_parallel_size": 2},
        False,
    ),
}
"""Layout of `benchmarks/learning.py`, what its server has besides, and whether the GPUs are on two machines."""


@pytest.mark.parametrize("name", CASES)
def test_a_server_of_that_kind_takes_weights_and_is_on_policy(
    lab, benchmark_module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    learning = benchmark_module("learning")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    layout, server, apart = CASES[name]
    if learning.CASES[layout].backend == "vllm" and "vllm" not in made_environments():
        pytest.skip("needs the environment that `make vllm` makes")
    pipeline = learning.pipeline(layout, STEPS)
    pipeline["engines"]["generator"]["server"] |= server
    for variable, value in learning.ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    if apart:
        # Tensor parallelism stays within a machine in the trainer; the server's does not.
        pipeline["engines"]["actor"]["parallel"] = {}
        pipeline["groups"]["train"] = {"nodes": 2, "cpus_per_node": 0, "gpus_per_node": 1}
        with two_machines(tmp_path) as address:
            run = ended(lab, pipeline, tmp_path, ray_address=address)
    else:
        run = ended(lab, pipeline, tmp_path)
    metrics = run.metrics()
    assert [line["policy_version"] for line in metrics] == list(range(1, STEPS + 1))
    for line in metrics:
        assert line["mismatch/logprob_diff/mean"] <= learning.LARGEST_DIFFERENCE
        assert line["staleness/max"] == 0


def ended(lab: Any, pipeline: dict[str, Any], folder: Path, ray_address: str | None = None) -> Any:
    """The run, when it has ended well."""
    file = folder / "pipeline.yaml"
    file.write_text(yaml.safe_dump(pipeline, sort_keys=False))
    run = lab.start(file, folder / "run", ray_address=ray_address)
    assert run.wait() == 0, run.output
    return run


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[str]:
    """A Ray cluster of two machines on this host, with one of its GPUs each; its address."""
    with listen("127.0.0.1") as free:
        port = free.getsockname()[1]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    # Not in the folder where `dagrl run` looks for running clusters.
    scratch = tempfile.mkdtemp(prefix="ray-")
    head = [
        "--head",
        "--node-ip-address=127.0.0.1",
        f"--port={port}",
        "--include-dashboard=false",
        f"--temp-dir={scratch}",
    ]
    machines: list[subprocess.Popen[bytes]] = []
    try:
        for gpu, how in zip(visible, (head, [f"--address=127.0.0.1:{port}"]), strict=True):
            machines.append(_machine(gpu, how, folder / f"machine_{len(machines)}.log"))
        yield f"127.0.0.1:{port}"
    finally:
        for machine in machines:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(machine.pid, signal.SIGKILL)
            machine.wait()
        shutil.rmtree(scratch, ignore_errors=True)


def _machine(gpu: str, how: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A machine of Ray's that is up."""
    resources = ["--num-cpus=8", f"--num-gpus={int(bool(gpu))}", f"--object-store-memory={10**9}"]
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        *how,
        *resources,
        "--block",
        "--disable-usage-stats",
    ]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "RAY_AUTH_MODE": "disabled"}
    with log.open("w") as file:
        machine = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    deadline = time.monotonic() + _START_S
    while "Ray runtime started" not in log.read_text():
        assert machine.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return machine
