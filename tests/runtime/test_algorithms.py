"""Estimators and losses beside GRPO's, from the pipeline file to the optimizer."""

from __future__ import annotations

import math

import pytest


@pytest.mark.parametrize(
    ("estimator", "loss"),
    [
        ("rloo", {"policy": "gspo", "clip_ratio": 3e-4, "clip_ratio_high": 4e-4}),
        # Whitened over both shards of a step.
        ("reinforce_plus_plus", {"policy": "cispo", "aggregation": "seq-mean-token-sum-norm"}),
    ],
)
def test_a_recipe_trains(lab, tmp_path, estimator, loss):
    pipeline = lab.tiny_pipeline()
    del pipeline["nodes"]["ref"], pipeline["engines"]["reference"]
    pipeline["nodes"]["reward"] = {"op": "reward", "fn": "rewards:by_length"}
    pipeline["nodes"]["advantage"]["estimator"] = estimator
    pipeline["nodes"]["update"]["loss"] = loss
    pipeline["run"] = {"steps": 2, "seed": 3}
    path = lab.write_pipeline(tmp_path, pipeline)
    with (tmp_path / "rewards.py").open("a") as module:
        module.write("\ndef by_length(response):\n    return float(sum(map(ord, response)))\n")
    run = lab.start(path, tmp_path / "run")
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        assert line["grad_norm"] > 0
        assert math.isfinite(line["loss/policy"])
        # Two optimizer steps on a batch: the second finds that the policy has moved.
        assert 0 < line["ratio/clip_fraction"] <= 1 if loss["policy"] == "gspo" else line["kl/old"] > 0
