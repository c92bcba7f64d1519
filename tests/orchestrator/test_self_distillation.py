"""A policy that teaches itself: a moving average of its weights gets a longer prompt; resumed from a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def self_taught(lab: Any) -> dict[str, Any]:
    """GRPO with a reference beside the teacher, both on the trainer's rank."""
    pipeline = lab.tiny_pipeline()
    pipeline["engines"]["average"] = {"backend": "megatron", "frozen_copy_of": "actor", "moving_average": 0.3}
    nodes = pipeline["nodes"]
    nodes["told"] = {
        "op": "tell",
        "demonstration": "answer",
        "peer_reward": 0.9,
        "max_prompt_tokens": 16,
        "template": "{{ demonstration }}{{ response }}={{ prompt }}",
    }
    nodes["teacher"] = {
        "op": "logprob",
        "engine": "average",
        "read": {"prompt_tokens": "teacher_prompt_tokens"},
        "write": "teacher_logprob",
    }
    nodes["update"]["loss"]["distillation"] = {"divergence": "k2", "coef": 0.5}
    pipeline["run"] |= {"steps": 4, "save_every": 1, "validate_every": None, "keep": "all"}
    return pipeline


def test_a_resumed_run_goes_on_with_the_same_teacher(lab, tmp_path: Path) -> None:
    path = lab.write_pipeline(tmp_path, self_taught(lab))
    unbroken = lab.start(path, tmp_path / "unbroken")
    assert unbroken.wait() == 0, unbroken.output
    shutil.copytree(unbroken.folder, tmp_path / "resumed", symlinks=True)
    for step in (3, 4):
        shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"step_{step}")
    again = lab.start(path, tmp_path / "resumed")
    assert again.wait() == 0, again.output
    assert "going on after step 2" in again.output
    found = lab.comparable(again.metrics())
    assert found == lab.comparable(unbroken.metrics())
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert {line["tell/told_fraction"] for line in found} == {1.0}
    assert len({line["distillation/loss"] for line in found}) == 4
