"""Losses on GPUs: a server's process, a generator's worker and a trainer's, in turns on one GPU and apart on two."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 24
LOSSES = 3


@pytest.mark.parametrize("name", ["one_gpu_colocated", "two_gpus_apart"])
def test_a_run_outlives_a_server_a_generator_and_a_trainer(lab, benchmark_module, tmp_path: Path, name: str) -> None:
    learning = benchmark_module("learning")
    if torch.cuda.device_count() < learning.CASES[name].gpus:
        pytest.skip(f"needs {learning.CASES[name].gpus} GPUs")
    pipeline = learning.pipeline(name, STEPS)
    pipeline["run"] |= {"save_every": 4, "max_restarts": LOSSES}
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(pipeline, sort_keys=False))
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in learning.ENVIRONMENT.items():
            patch.setenv(variable, value)
        run = lab.start(tmp_path / "pipeline.yaml", tmp_path / "run")
    run.wait_for_step(3)
    scheduler_of(worker(run, "generator/0")).kill()
    run.wait_for_step(8)
    assert run.output.count("generator/0 restarted") == 1, run.output
    os.kill(worker(run, "generator/0"), signal.SIGKILL)
    run.wait_for_step(14)
    assert run.output.count("generator/0 restarted") == 2, run.output
    os.kill(worker(run, "actor/0"), signal.SIGKILL)
    assert run.wait() == 0, run.output
    assert "all of the run goes on from its last checkpoint (restart 3 of 3)" in run.output
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert [line["policy_version"] for line in metrics] == list(range(1, STEPS + 1))
    assert metrics[-1]["run/restarts"] == LOSSES
    # A server that lacked the newest weights would sample from another policy.
    differences = [line["mismatch/logprob_diff/mean"] for line in metrics]
    assert max(differences) <= learning.LARGEST_DIFFERENCE, differences
    assert run.left_behind() == []


def worker(run: Any, name: str) -> int:
    return json.loads((run.folder / "workers.json").read_text())[name]["pid"]


def scheduler_of(pid: int) -> psutil.Process:
    below = psutil.Process(pid).children(recursive=True)
    return next(each for each in below if "sglang::scheduler" in "".join(each.cmdline()))
