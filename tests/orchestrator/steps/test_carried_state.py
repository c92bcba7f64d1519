"""Weights that follow a target: which step's divergence they depend on, and that a resumed run continues with them."""

from __future__ import annotations

import numpy as np
import pytest

from dagrl.config.schema import Pipeline
from dagrl.data.stats import Stat
from dagrl.orchestrator.steps.carried_state import DIVERGENCE, KlControl
from dagrl.workers.messages import Block


def pipeline(staleness: int = 0, **kl) -> Pipeline:
    charge = {"coef": 0.5, "target_kl": 0.1, "horizon": 1000} | kl
    return Pipeline.model_validate(
        {
            "name": "steered",
            "model": {"path": "model"},
            "data": {"train": "train.parquet", "prompts_per_step": 4, "max_prompt_tokens": 8},
            "groups": {"train": {"cpus_per_node": 1}},
            "engines": {"actor": {"backend": "megatron", "group": "train", "optimizer": {"lr": 1e-3}}},
            "nodes": {"advantage": {"op": "advantage", "estimator": "grpo", "kl_in_reward": charge}},
            "schedule": {"max_staleness": staleness},
            "run": {"steps": 9},
        }
    )


def block(divergences: list[float], shard: int = 0, name: str = DIVERGENCE) -> Block:
    stats = {name: Stat.of(divergences), "other": Stat.of([9.0])}
    return Block(np.zeros(0, dtype=np.int64), None, None, 0, 1, (shard,), stats)


def test_the_weight_of_a_step_follows_from_the_step_before():
    control = KlControl(pipeline(), {}, first_step=1)
    assert control.weight("advantage", 1) == 0.5
    # 500 samples of 0.11 on average, in two shards: 0.5 (1 + 0.1 / 2).
    control.add("advantage", 1, block([0.12] * 250, shard=1, name=f"actor/{DIVERGENCE}"))
    control.add("advantage", 1, block([0.10] * 250))
    assert control.weight("advantage", 2) == pytest.approx(0.525, abs=1e-12)
    assert control.weight("advantage", 1) == 0.5


def test_a_shard_that_is_computed_again_counts_once():
    control = KlControl(pipeline(), {}, first_step=1)
    for divergence in (0.3, 0.11):
        control.add("advantage", 1, block([divergence] * 500))
    assert control.weight("advantage", 2) == pytest.approx(0.525, abs=1e-12)


def test_steps_that_are_ahead_have_the_weight_from_before():
    control = KlControl(pipeline(staleness=2), {}, first_step=1)
    for step in (1, 2):
        control.add("advantage", step, block([0.5] * 500))
    assert [control.weight("advantage", step) for step in (1, 2, 3, 4, 5)] == pytest.approx(
        [0.5, 0.5, 0.5, 0.55, 0.605]
    )


def test_a_step_without_samples_changes_nothing():
    control = KlControl(pipeline(), {}, first_step=1)
    control.add("advantage", 1, block([]))
    assert control.weight("advantage", 2) == 0.5


def test_without_a_target_the_weight_is_the_files():
    control = KlControl(pipeline(target_kl=None), {}, first_step=1)
    control.add("advantage", 1, block([0.5] * 500))
    assert (control.weight("advantage", 2), control.weight("other", 2), control.after(1)) == (None, None, {})


def test_a_run_resumed_with_another_staleness_continues():
    more = KlControl(pipeline(staleness=2), {"advantage": (0.3,)}, first_step=5)
    assert [more.weight("advantage", step) for step in (5, 6, 7)] == [0.3, 0.3, 0.3]
    less = KlControl(pipeline(), {"advantage": (0.3, 0.4)}, first_step=5)
    assert less.weight("advantage", 5) == 0.3
