"""A real run that learns from a vLLM server in an environment of its own; its server is killed on the way."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import yaml

ENVIRONMENT = Path(__file__).parents[2] / ".venv-vllm"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not ENVIRONMENT.exists(), reason="`make vllm` builds the environment of vLLM"),
]

TEMPLATE = Path(__file__).parents[2] / "dag_templates" / "tiny_vllm.yaml"
PROMPTS, N = 32, 32
KILLED_AFTER = 3
STEPS = [8, pytest.param(36, marks=pytest.mark.soak)]
"""Steps of a run that only checks its weights, and of a run that learns."""


@pytest.fixture(scope="module", params=STEPS)
def steps(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def run(steps, lab, tmp_path_factory):
    """The demo with vLLM, under way; it has trained for some steps."""
    folder = tmp_path_factory.mktemp("vllm")
    sync = {"route": "broadcast", "checksum": True, "bucket_mib": 1}
    pipeline = {
        "extends": str(TEMPLATE),
        "engines": {"generator": {"environment": str(ENVIRONMENT), "weight_sync": sync}},
        "run": {"steps": steps, "save_every": None, "validate_every": steps, "validate_first": False},
        "track": ["console"],
    }
    pipeline["run"] |= {"max_restarts": 1, "samples_per_step": PROMPTS * N}
    file = folder / "pipeline.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    run = lab.start(file, folder / "run")
    run.wait_for_step(KILLED_AFTER, 400.0)
    return run


@pytest.fixture(scope="module")
def ended(run):
    """The same run at its end; its server was killed while it sampled."""
    worker = psutil.Process(json.loads((run.folder / "workers.json").read_text())["generator/0"]["pid"])
    (engine,) = [each for each in worker.children(recursive=True) if "EngineCore" in each.name()]
    # Within the rollout of a later step.
    run.wait_for_step(run.metrics()[-1]["step"] + 1)
    time.sleep(0.1)
    os.kill(engine.pid, 9)
    assert run.wait(500.0) == 0, run.output
    return run


def test_its_worker_runs_in_its_environment(run) -> None:
    worker = psutil.Process(json.loads((run.folder / "workers.json").read_text())["generator/0"]["pid"])
    assert str(ENVIRONMENT.resolve()) in " ".join(Path(each.path).as_posix() for each in worker.memory_maps())


def test_it_trains_on_what_the_server_samples(ended, steps) -> None:
    lines = [line for line in ended.metrics() if line["step"] > 0]
    assert [line["policy_version"] for line in lines] == list(range(1, steps + 1))
    for line in lines:
        assert line["staleness/max"] == 0
        assert line["mismatch/logprob_diff/max"] <= 1e-5, "the server samples with the trainer's newest weights"
    assert ended.left_behind() == []


def test_a_server_that_dies_is_started_again_and_loses_and_doubles_nothing(ended, steps) -> None:
    assert "a process of vLLM server generator/0 has died" in ended.output
    assert "generator/0 restarted" in ended.output
    assert ended.metrics()[-1]["run/restarts"] == 1
    for step in range(1, steps + 1):
        rows = pq.read_table(ended.folder / "samples" / f"step_{step}.parquet").to_pylist()
        assert sorted(row["sample_id"] for row in rows) == list(range(PROMPTS * N))
        assert {row["policy_version"] for row in rows} == {step - 1}
        assert len({(row["group_id"], row["prompt"]) for row in rows}) == PROMPTS


@pytest.mark.parametrize("steps", STEPS[1:], indirect=True, scope="module")
def test_it_learns(ended) -> None:
    rewards = [line["reward/mean"] for line in ended.metrics() if line["step"] > 0]
    assert rewards[0] < 0.1
    assert sum(rewards[-5:]) / 5 > 0.9
