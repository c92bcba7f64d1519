"""What a batch says about its prompts."""

from __future__ import annotations

import numpy as np
import pytest

from dagrl.ops.trajectories import group_outcomes


def test_groups_have_means_of_rewards_passes_and_advantages(bench) -> None:
    batch = bench.batch(
        [0, 1, 4, 5, 6],
        group_id=[0, 0, 2, 2, 2],
        reward=[1.0, 0.5, 0.0, 2.0, 1.0],
        advantage=[[0.5, -0.5], [-1.5], [], [0.0], [3.0]],
    )
    data = bench.pipeline({"data": {"order": {"adaptive": {}}}}).data
    found = group_outcomes(batch, data)
    assert found is not None
    assert found.groups.tolist() == [0, 2]
    assert found.reward.tolist() == [0.75, 1.0]
    assert found.pass_rate.tolist() == [0.5, pytest.approx(2 / 3)]
    assert found.advantage.tolist() == [1.0, 1.0]
    alone = group_outcomes(batch.select(["group_id"]), data)
    assert alone is not None and np.isnan([alone.reward, alone.pass_rate, alone.advantage]).all()
    assert group_outcomes(batch, bench.pipeline({}).data) is None, "the order does not learn"
