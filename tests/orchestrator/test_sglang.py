"""A real run whose generator is a SGLang server on the CPU, until first the server, then its worker is killed."""

from __future__ import annotations

import json
import os
import signal

import psutil
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(lab, tmp_path_factory):
    """A run under way that has trained for two steps: a mixture, whose tokens the trainer routes as SGLang did.

    Megatron-bridge builds the trainer's model.
    """
    folder = tmp_path_factory.mktemp("sglang")
    pipeline = lab.tiny_pipeline()
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    experts |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0}
    pipeline["model"]["init"] |= {"model_type": "glm4_moe", "use_qk_norm": True, **experts}
    pipeline["engines"]["actor"]["router_replay"] = True
    pipeline["engines"]["generator"] = {
        "backend": "sglang",
        "group": "rollout",
        "weights_from": "actor",
        "server": {"log_level": "info"},
        "weight_sync": {"route": "broadcast", "checksum": True, "bucket_mib": 1},
    }
    brief = {"path": "train.parquet", "n": 2, "sampling": {"max_new_tokens": 1}}
    pipeline["data"]["val"] = {"all": "train.parquet", "brief": brief}
    pipeline["run"] |= {"steps": 100_000, "save_every": 100_000, "validate_every": 2, "max_restarts": 1}
    run = lab.start(lab.write_pipeline(folder, pipeline), folder / "run")
    run.wait_for_step(3)
    return run


def test_it_trains_on_what_the_server_samples(run):
    steps = [line for line in run.metrics() if line["step"] > 0][:3]
    assert [line["policy_version"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["staleness/max"] == 0
        assert 1 <= line["response_tokens/mean"] <= 3
        assert line["mismatch/logprob_diff/max"] <= 1e-5, "the server samples with the trainer's newest weights"
    assert {"val/all/mean@1", "val/brief/mean@2"} <= steps[1].keys()
    assert steps[1]["val/brief/response_tokens/max"] == 1 < steps[1]["val/all/response_tokens/max"]


def test_output_of_its_processes_is_kept(run):
    assert "max_total_num_tokens" in (run.folder / "logs" / "generator-0-tp0.log").read_text()


def test_a_server_that_dies_is_started_again_and_trained_with(run):
    worker = psutil.Process(pid_of_worker(run))
    scheduler_of(worker).kill()
    last = run.metrics()[-1]["step"]
    # One or two steps may have been on their way without it.
    run.wait_for_step(last + 4)
    assert "a process of SGLang server generator/0 has died" in run.output
    assert "generator/0 restarted" in run.output
    assert pid_of_worker(run) == worker.pid and worker.is_running(), "the worker has started another server"
    for line in run.metrics()[-2:]:
        assert line["run/restarts"] == 1
        assert line["mismatch/logprob_diff/max"] <= 1e-5, "it has the newest weights"


def test_a_worker_that_is_killed_takes_its_server_along(run):
    """The last test: the run does not come back."""
    os.kill(pid_of_worker(run), signal.SIGKILL)
    assert run.wait() == 1
    assert "worker  generator/0" in run.output and "the worker's process died" in run.output
    assert "after 1 restart, as many as run.max_restarts allows" in run.output
    assert run.left_behind() == []


def scheduler_of(worker: psutil.Process) -> psutil.Process:
    """The server's process that computes. Its title cannot be relied on: on a busy host it stayed ``python``."""
    return max(worker.children(recursive=True), key=lambda process: sum(process.cpu_times()[:2]))


def pid_of_worker(run) -> int:
    return json.loads((run.folder / "workers.json").read_text())["generator/0"]["pid"]
