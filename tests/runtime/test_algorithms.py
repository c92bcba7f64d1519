"""A recipe other than GRPO, from the pipeline file to the optimizer."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

REWARD = """

def spread(response):
    return float(sum(map(ord, response)))
"""


def test_advantages_whitened_over_the_step_train_with_the_ratio_of_whole_responses(lab, tmp_path):
    pipeline = lab.tiny_pipeline()
    del pipeline["nodes"]["ref"], pipeline["engines"]["reference"]
    pipeline["nodes"]["reward"] = {"op": "reward", "fn": "rewards:spread"}
    # The step has two shards; the estimator sees them together.
    pipeline["nodes"]["advantage"]["estimator"] = "reinforce_plus_plus_baseline"
    pipeline["nodes"]["update"]["loss"] = {"policy": "gspo", "clip_ratio": 3e-4, "clip_ratio_high": 4e-4}
    pipeline["run"] = {"steps": 2, "seed": 3}
    path = lab.write_pipeline(tmp_path, pipeline)
    with (tmp_path / "rewards.py").open("a") as module:
        module.write(REWARD)
    run = lab.start(path, tmp_path / "run")
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        assert line["grad_norm"] > 0
        # Of the two optimizer steps on a batch, the second finds that the policy has moved beyond such bounds.
        assert 0 < line["ratio/clip_fraction"] < 1
