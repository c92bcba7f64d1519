"""Episodes of Harbor's package over a run: each once, with every token."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from harbor_tasks import AGENT, write_task

from dagrl.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.soak]
PYTHON = Path(__file__).parents[2] / ".agents" / "harbor" / "bin" / "python"


def test_a_hundred_episodes_have_every_token_once(lab, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    even = "case $(head -c 1 /app/answer.txt) in [02468]) r=1;; *) r=0;; esac; echo $r >/logs/verifier/reward.txt"
    for left in range(4):
        write_task(tasks / f"add-{left}", even, instruction=f"{left}+1=")
    pipeline = lab.tiny_pipeline()
    args = {"tasks": str(tasks), "agent": "adder:Adder", "environment": "local"}
    agent = {"environment": "harbor", "python": str(PYTHON), "args": args, "concurrency": 8}
    pipeline["nodes"]["rollout"] |= {"n": 5, "agent": agent, "sampling": {"max_new_tokens": 16}}
    pipeline["nodes"]["reward"] = {"op": "reward", "fn": "agent"}
    pipeline["data"] |= {"prompts_per_step": 4}
    del pipeline["data"]["val"]
    pipeline["run"] = {"steps": 5, "seed": 3}
    path = lab.write_pipeline(tmp_path, pipeline)
    (tmp_path / "adder.py").write_text(AGENT)
    call = ["data", "environment", "harbor", "--python", str(PYTHON), "--out", str(tmp_path / "train.parquet")]
    assert main([*call, "--args", json.dumps(args | {"agent": "oracle"})]) == 0
    run = lab.start(path, tmp_path / "run")
    assert run.wait() == 0, run.output
    episodes: Counter[Any] = Counter()
    for step, line in enumerate(run.metrics(), 1):
        assert line["agent/requests"] == 2 and line["agent/failed_fraction"] == 0
        # The trainer's log-probs of all replies equal the generator's.
        assert line["mismatch/logprob_diff/max"] < 1e-4
        table = pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pylist()
        episodes.update((step, row["sample_id"]) for row in table)
        for row in table:
            assert row["reward"] == (row["response"][:1] in set("02468")), row
    assert episodes == dict.fromkeys(((step, sample) for step in range(1, 6) for sample in range(20)), 1)
    assert run.left_behind() == []
