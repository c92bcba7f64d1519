"""A judge of SGLang on the GPU of trainer and generator: three engines that take turns in its memory."""

from __future__ import annotations

import pytest
import torch
import yaml

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_judge_takes_its_turn_on_the_gpu(lab, benchmark_module, tmp_path, monkeypatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    learning = benchmark_module("learning")
    pipeline = learning.pipeline("one_gpu_colocated", 3)
    judge = {"backend": "sglang", "group": "train", "server": pipeline["engines"]["generator"]["server"]}
    pipeline["engines"]["wise"] = judge
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
