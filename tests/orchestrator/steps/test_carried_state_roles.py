"""Baselines of roles: which ones a step begins with, and that a resumed run continues with them."""

from __future__ import annotations

import numpy as np
import pytest

from dagrl.config.schema import Pipeline, Scope
from dagrl.data.stats import Stat
from dagrl.orchestrator.steps.carried_state import RoleBaselines
from dagrl.scheduler.plan import HOST, PlannedTask, Rows
from dagrl.workers.messages import Block


def pipeline(estimator: str = "rae") -> Pipeline:
    return Pipeline.model_validate(
        {
            "name": "roles",
            "model": {"path": "model"},
            "data": {"train": "train.parquet", "prompts_per_step": 4, "max_prompt_tokens": 8},
            "groups": {"train": {"cpus_per_node": 1}},
            "engines": {"actor": {"backend": "megatron", "group": "train", "optimizer": {"lr": 1e-3}}},
            "nodes": {"advantage": {"op": "advantage", "estimator": estimator}},
            "run": {"steps": 9},
        }
    )


def task(prefix: str = "") -> PlannedTask:
    return PlannedTask("advantage", "advantage", "advantage", HOST, Scope.BATCH, Rows.TRAIN, metric_prefix=prefix)


def block(baselines: dict[str, float], prefix: str = "") -> Block:
    stats = {f"{prefix}baseline/{role}": Stat.of([value]) for role, value in baselines.items()}
    return Block(np.zeros(0, dtype=np.int64), None, None, 0, 1, (0,), stats | {"other": Stat.of([9.0])})


@pytest.mark.parametrize("prefix", ["", "baseline/", "second/"])
def test_a_step_begins_with_the_baselines_of_the_step_before(prefix: str) -> None:
    baselines = RoleBaselines(pipeline(), {}, first_step=1)
    assert baselines.before("advantage", 1) == {}
    baselines.add(task(prefix), 1, block({"a": 0.1 + 0.2, "player/1": -1.0}, prefix))
    assert baselines.before("advantage", 2) == {"a": 0.1 + 0.2, "player/1": -1.0}
    # A lost worker's task runs again, with the same baselines.
    assert baselines.before("advantage", 1) == {}


def test_other_estimators_have_none() -> None:
    baselines = RoleBaselines(pipeline("grpo"), {"advantage": {"a": 1.0}}, first_step=1)
    baselines.add(task(), 1, block({"a": 2.0}))
    baselines.commit(1)
    assert (baselines.before("advantage", 2), baselines.before("other", 2), baselines.after(1)) == ({}, {}, {})
