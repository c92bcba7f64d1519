"""A run that trains nothing."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow


def test_a_pipeline_that_only_samples_ends_and_goes_on_with_its_prompts(lab, tmp_path):
    pipeline = lab.tiny_pipeline()
    pipeline["engines"] = {"generator": {"backend": "hf", "group": "rollout"}}
    del pipeline["groups"]["train"]
    pipeline["nodes"] = {name: pipeline["nodes"][name] for name in ("rollout", "reward")}
    pipeline["data"]["prompts_per_step"] = 4
    pipeline["run"]["validate_every"] = None
    file = lab.write_pipeline(tmp_path, pipeline)
    for steps in (2, 3):
        run = lab.start(file, tmp_path / "run", f"run.steps={steps}")
        assert run.wait() == 0
        assert f"finished step {steps}" in run.output
    samples = [pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pylist() for step in (1, 2, 3)]
    prompts = [{sample["prompt"] for sample in each} for each in samples]
    assert not prompts[2] & (prompts[0] | prompts[1]), "the third step has the prompts that follow"
