"""A real run whose generator is a vLLM server on the CPU, in an environment of its own, until its server is killed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

ENVIRONMENT = Path(__file__).parents[2] / ".venv-vllm"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not ENVIRONMENT.exists(), reason="`make vllm` builds the environment of vLLM"),
]


@pytest.fixture(scope="module")
def run(lab, tmp_path_factory):
    """A run under way that has trained for three steps."""
    folder = tmp_path_factory.mktemp("vllm")
    pipeline = lab.tiny_pipeline()
    pipeline["model"]["init"] |= {"head_dim": 32}
    pipeline["engines"]["generator"] = {
        "backend": "vllm",
        "group": "rollout",
        "weights_from": "actor",
        "environment": str(ENVIRONMENT),
        "weight_sync": {"route": "broadcast", "checksum": True, "bucket_mib": 1},
    }
    pipeline["run"] |= {"steps": 100_000, "save_every": 100_000, "validate_every": 2, "max_restarts": 1}
    run = lab.start(lab.write_pipeline(folder, pipeline), folder / "run")
    run.wait_for_step(3, 400.0)
    return run


def test_it_trains_on_what_the_server_samples(run) -> None:
    steps = [line for line in run.metrics() if line["step"] > 0][:3]
    assert [line["policy_version"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["staleness/max"] == 0
        assert 1 <= line["response_tokens/mean"] <= 3
        assert line["mismatch/logprob_diff/max"] <= 1e-5, "the server samples with the trainer's newest weights"
    assert "val/reward/mean" in steps[1]


def test_its_worker_runs_in_its_environment(run) -> None:
    worker = psutil.Process(json.loads((run.folder / "workers.json").read_text())["generator/0"]["pid"])
    assert worker.environ().get("VIRTUAL_ENV", str(ENVIRONMENT)) and str(ENVIRONMENT) in " ".join(
        open_file.path for open_file in worker.memory_maps()
    )


def test_a_server_that_dies_is_started_again_and_trained_with(run) -> None:
    worker = psutil.Process(json.loads((run.folder / "workers.json").read_text())["generator/0"]["pid"])
    engines = [each for each in worker.children(recursive=True) if "EngineCore" in each.name()]
    assert engines
    os.kill(engines[0].pid, 9)
    last = run.metrics()[-1]["step"]
    run.wait_for_step(last + 4, 400.0)
    assert "a process of vLLM server generator/0 has died" in run.output
    assert "generator/0 restarted" in run.output
