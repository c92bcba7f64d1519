"""The same pipeline on other layouts: same data, same numbers."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_dp2_x_tp2_trains_like_one_process(lab, unbroken, tmp_path):
    pipeline = lab.tiny_pipeline()
    pipeline["groups"]["train"] = {"cpus_per_node": 4}
    pipeline["engines"]["actor"]["parallel"] = {"tensor_model_parallel_size": 2}
    pipeline["groups"]["rollout"] = {"cpus_per_node": 2}
    pipeline["run"] = {"steps": 2, "seed": 3}
    run = lab.start(lab.write_pipeline(tmp_path, pipeline), tmp_path / "run")
    assert run.wait() == 0, run.output
    for mine, theirs in zip(run.metrics(), unbroken.metrics(), strict=False):
        for name in ("reward/mean", "loss/policy", "kl/ref", "entropy", "grad_norm", "ratio/mean", "kl/old"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), (mine["step"], name)


def test_engines_that_share_a_group_give_the_same_numbers(lab, unbroken, tmp_path):
    pipeline = lab.tiny_pipeline()
    pipeline["engines"]["generator"]["group"] = "train"
    del pipeline["groups"]["rollout"]
    pipeline["run"] = {"steps": 2, "seed": 3}
    run = lab.start(lab.write_pipeline(tmp_path, pipeline), tmp_path / "run")
    assert run.wait() == 0, run.output
    assert lab.comparable(run.metrics()) == lab.comparable(unbroken.metrics()[:2])
