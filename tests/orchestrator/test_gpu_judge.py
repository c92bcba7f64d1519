"""A judge of SGLang on the GPUs of trainer and generator: who takes turns in memory, and who follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

FOLLOWS = {"weights_from": "actor", "weight_sync": {"checksum": True}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "it stays as it is": ("one_gpu_colocated", {"group": "train"}, {}),
    "it follows the trainer on its own GPU": ("one_gpu_colocated", {"group": "train", **FOLLOWS}, {}),
    "it follows the trainer over NCCL": ("two_gpus_apart", {"group": "rollout", **FOLLOWS}, {}),
    "servers come and go beside a trainer that stays": (
        "two_gpus_colocated_tp2_to_tp2",
        {"group": "train", **FOLLOWS},
        {"sleep": False},
    ),
}
"""Layout of trainer and generator, the judge's engine, and further keys of the trainer."""


@pytest.mark.parametrize("name", CASES)
def test_a_judge_takes_its_turn_on_the_gpu(lab, benchmark_module, tmp_path, monkeypatch, name: str) -> None:
    learning = benchmark_module("learning")
    layout, judge, trainer = CASES[name]
    if torch.cuda.device_count() < learning.CASES[layout].gpus:
        pytest.skip(f"needs {learning.CASES[layout].gpus} GPUs")
    pipeline = learning.pipeline(layout, 3)
    server = pipeline["engines"]["generator"]["server"]
    pipeline["engines"]["actor"] |= trainer
    pipeline["engines"]["wise"] = {"backend": "sglang", "server": server, **judge}
    pipeline["nodes"] = {
        "reward": {
            "op": "judge",
            "fn": None,
            "engine": "wise",
            "prompt": "{prompt}{response}",
            "parser": r"\d",
            "sampling": {"temperature": 0.0, "max_new_tokens": 4},
            "max_prompt_tokens": 24,
            "on_error": -1.0,
        }
    }
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(pipeline, sort_keys=False))
    for variable, value in learning.ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    run = lab.start(file, tmp_path / "run")
    assert run.wait() == 0, run.output
    for line in run.metrics():
        assert 0 < line["judge/reply_tokens"] <= 4
        assert 0 <= line["judge/failed_fraction"] < 1
        assert -1 <= line["reward/mean"] <= 9
    assert run.left_behind() == []
