"""Runs whose rollouts are environments of other packages, in Pythons of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from verifiers_tasks import ADDING, LOOP, PYTHON

from dagrl.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.soak]
TEMPLATE = Path(__file__).parents[2] / "dag_templates" / "tiny_agent.yaml"


@pytest.mark.skipif(not PYTHON.exists(), reason="`make verifiers` builds .agents/verifiers")
def test_the_tokens_of_verifiers_episodes_are_exact(lab, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adding.py").write_text(ADDING)
    args = {"taskset": {"id": "adding", "most": 9}, "agent": LOOP}
    call = ["data", "environment", "verifiers", "--python", str(PYTHON), "--out", "tasks.parquet"]
    assert main([*call, "--args", json.dumps(args)]) == 0
    pipeline = {
        "extends": str(TEMPLATE),
        "data": {"train": "tasks.parquet", "val": None, "prompts_per_step": 4},
        "nodes": {
            "rollout": {
                "agent": {"environment": "verifiers", "args": args, "python": str(PYTHON)},
                "sampling": {"max_new_tokens": 16},
            }
        },
        "run": {"steps": 2, "validate_every": None, "validate_first": False, "save_every": None},
        "track": ["console"],
    }
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(pipeline))
    run = lab.start(tmp_path / "pipeline.yaml", tmp_path / "run")
    assert run.wait() == 0, run.output
    for step, line in enumerate(run.metrics(), 1):
        # The trainer's log-probs of both replies equal the generator's, so their tokens are the sampled ones.
        assert line["mismatch/logprob_diff/max"] < 1e-4
        assert line["agent/failed_fraction"] == 0 and line["agent/requests"] == line["turns/mean"] == 2
        table = pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pydict()
        assert table["sample_id"] == list(range(64)), "each episode once"
        for response, reward in zip(table["response"], table["reward"], strict=True):
            assert "1+1=" in response and reward in (0, 0.5)
