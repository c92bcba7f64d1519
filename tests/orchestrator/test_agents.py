"""Two agents that are trained together, for two steps: each learns from what it has sampled itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TEMPLATE = Path(__file__).parents[2] / "dag_templates" / "multi_agent.yaml"
GENERATORS = ("solving", "verifying")


@pytest.mark.parametrize("backend", ["hf", pytest.param("sglang", marks=pytest.mark.soak)])
def test_each_is_trained_on_its_own_responses(lab, tmp_path, backend):
    servers = [f"engines.{name}.{said}" for name in GENERATORS for said in ("backend=sglang", "max_batch_size=null")]
    small = ("nodes.solve.n=4", "data.prompts_per_step=8", "run.steps=2", "run.validate_every=2", "track=[console]")
    run = lab.start(TEMPLATE, tmp_path / "run", *small, *(servers if backend == "sglang" else ()))
    assert run.wait() == 0, run.output
    first, second = run.metrics()
    for line in (first, second):
        for agent in ("", "update_verifier/"):
            # The generator's log-probs are those of the trainer that it follows, for the prompts that it was given.
            assert line[f"{agent}ratio/mean"] == 1.0
            assert line[f"{agent}mismatch/logprob_diff/max"] < 1e-5
            assert line[f"{agent}staleness/max"] == 0
        assert 0 < line["verify/response_tokens/mean"] <= 2 < line["response_tokens/max"] <= 3
    assert first["entropy"] != first["update_verifier/entropy"]
    assert "val/reward/verdict" in second and "val/reward/mean" in second
    saved = sorted(path.name for path in (run.folder / "checkpoints" / "step_2").iterdir() if path.is_dir())
    assert saved == ["solver", "verifier"]
    spans = {event["name"] for event in json.loads((run.folder / "timeline.json").read_text()) if event["ph"] == "X"}
    assert {"solve", "ask", "verify", "judge", "update", "update_verifier"} <= spans
    assert run.left_behind() == []
