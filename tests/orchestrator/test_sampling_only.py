"""A run that trains nothing."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow


def test_a_pipeline_that_only_samples_stops_and_continues_with_its_prompts(lab, tmp_path):
    pipeline = lab.tiny_pipeline()
    pipeline["engines"] = {"generator": {"backend": "hf", "group": "rollout"}}
    del pipeline["groups"]["train"]
    pipeline["nodes"] = {name: pipeline["nodes"][name] for name in ("rollout", "reward")}
    pipeline["data"]["prompts_per_step"] = 4
    pipeline["run"] |= {"validate_every": None, "steps": None, "epochs": 0.75}
    file = lab.write_pipeline(tmp_path, pipeline)
    # Engines take longer to start.
    run = lab.start(file, tmp_path / "run", "run.stop_after=1s")
    assert run.wait() == 4
    assert "stopped after step 1 in" in run.output
    run = lab.start(file, tmp_path / "run")
    assert run.wait() == 0
    assert "step 3/3  reward" in run.output
    assert "finished step 3" in run.output
    assert [line["epoch"] for line in run.metrics()] == [0.25, 0.5, 0.75]
    samples = [pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pylist() for step in (1, 2, 3)]
    prompts = [{sample["prompt"] for sample in each} for each in samples]
    assert not prompts[2] & (prompts[0] | prompts[1]), "the third step has the prompts that follow"
