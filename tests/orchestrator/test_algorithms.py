"""A recipe other than GRPO, from the pipeline file to the optimizer, with a reward that fails on one of the prompts."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

REWARD = """

def spread(response, prompt):
    if prompt == "3+3=":
        raise KeyError(prompt)
    return float(sum(map(ord, response)))
"""


@pytest.fixture(scope="module")
def metrics(lab, tmp_path_factory) -> list[dict[str, float]]:
    """Metrics of two steps of eight prompts, one epoch of the file's sixteen."""
    folder = tmp_path_factory.mktemp("whitened")
    pipeline = lab.tiny_pipeline()
    del pipeline["nodes"]["ref"], pipeline["engines"]["reference"]
    pipeline["nodes"]["reward"] = {"op": "reward", "fn": "rewards:spread", "on_error": -1.0}
    # The step has two shards; the estimator sees them together.
    pipeline["nodes"]["advantage"]["estimator"] = "reinforce_plus_plus_baseline"
    pipeline["nodes"]["update"]["loss"] = {"policy": "gspo", "clip_ratio": 3e-4, "clip_ratio_high": 4e-4}
    weights = {"rollout_is": "sequence", "rollout_is_batch_normalize": True}
    rejection = {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 1e-3}
    pipeline["nodes"]["update"]["rollout_correction"] = weights | rejection
    pipeline["run"] = {"steps": 2, "seed": 3}
    path = lab.write_pipeline(folder, pipeline)
    with (folder / "rewards.py").open("a") as module:
        module.write(REWARD)
    run = lab.start(path, folder / "run")
    assert run.wait() == 0, run.output
    return run.metrics()


def test_advantages_whitened_over_the_step_train_with_the_ratio_of_whole_responses(metrics):
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        assert line["grad_norm"] > 0
        # Of the two optimizer steps on a batch, the second finds that the policy has moved beyond such bounds.
        assert 0 < line["ratio/clip_fraction"] < 1


def test_generator_and_trainer_agree_and_so_nothing_is_corrected(metrics):
    """Both compute in float32 here, with the same weights."""
    for line in metrics:
        assert 0 < line["mismatch/logprob_diff/mean"] <= line["mismatch/logprob_diff/max"] < 1e-4
        assert line["mismatch/kl_k3"] < 1e-8
        assert line["mismatch/ratio/mean"] == pytest.approx(1, abs=1e-4)
        assert line["mismatch/rollout_ppl"] == pytest.approx(line["mismatch/trainer_ppl"], rel=1e-4)
        # The weights are divided by their mean over each mini-batch.
        assert line["correction/weight/mean"] == pytest.approx(1, abs=1e-6)
        assert line["correction/truncated_fraction"] == line["correction/rejected_responses"] == 0


def test_a_failing_reward_can_count_as_a_value(metrics):
    assert sum(line["reward/failed_fraction"] for line in metrics) == pytest.approx(1 / 8)
