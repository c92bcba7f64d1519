"""A run that trains nothing."""

from __future__ import annotations

import json
import sys

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow


def test_a_pipeline_that_only_samples_stops_and_continues_with_its_prompts(lab, tmp_path):
    pipeline = lab.tiny_pipeline()
    pipeline["engines"] = {"generator": {"backend": "hf", "group": "rollout"}}
    del pipeline["groups"]["train"]
    pipeline["nodes"] = {name: pipeline["nodes"][name] for name in ("rollout", "reward")}
    pipeline["data"]["prompts_per_step"] = 4
    pipeline["run"] |= {"validate_every": None, "steps": None, "epochs": 1}
    file = lab.write_pipeline(tmp_path, pipeline)
    # Engines take longer to start.
    run = lab.start(file, tmp_path / "run", "run.stop_after=1s")
    assert run.wait() == 4
    assert "stopped after step 1 in" in run.output
    told, alarms = tmp_path / "told.jsonl", 'run.stop_when=["epoch > 0 for 2"]'
    command = [sys.executable, "-c", f"import sys; open({str(told)!r}, 'a').write(sys.stdin.read() + chr(10))"]
    warnings = 'run.warn_when=["epoch > 0.3", "epok > 1"]'
    run = lab.start(file, tmp_path / "run", alarms, warnings, f"run.alarm_command={json.dumps(command)}")
    # Step 1, before the resume, was the first of two; step 3 has begun.
    assert run.wait() == 5, run.output
    assert "step 2: epoch is 0.5 (run.warn_when: epoch > 0.3)\n" in run.output
    assert "step 2: epoch is 0.5 (run.stop_when: epoch > 0 for 2); the run ends, with a checkpoint\n" in run.output
    assert "stopped after step 3 in" in run.output and run.output.count("(run.stop_when: epoch") == 2
    assert "step 2 has no metric epok; did you mean `epoch`?" in run.output
    assert (run.folder / "checkpoints" / "step_3").is_dir()
    calls = [json.loads(line) for line in told.read_text().splitlines()]
    assert sorted((call["step"], call["value"], call["stops"]) for call in calls) == [(2, 0.5, False), (2, 0.5, True)]
    run = lab.start(file, tmp_path / "run")
    assert run.wait() == 0
    assert "step 4/4  reward" in run.output
    assert "finished step 4" in run.output
    assert [line["epoch"] for line in run.metrics()] == [0.25, 0.5, 0.75, 1]
    samples = [pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pylist() for step in (1, 2, 3)]
    prompts = [{sample["prompt"] for sample in each} for each in samples]
    assert not prompts[2] & (prompts[0] | prompts[1]), "the third step has the prompts that follow"
