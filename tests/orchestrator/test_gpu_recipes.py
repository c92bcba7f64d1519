"""Critics, reward models, preferences and experts on one GPU, where all engines take turns.

Without a GPU the same runs go on the CPU, with wider bounds than they need there: that is how to try a change here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
SMALLER = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
GIVEN = {"responses": ["reward_model.ground_truth"], "max_response_tokens": 3}
DEVICES = {"cpus_per_node": 0, "gpus_per_node": 1} if torch.cuda.is_available() else {"cpus_per_node": 1}


def start(lab: Any, folder: Path, recipe: list[str], *overrides: str, **sections: Any) -> Any:
    """A recipe and sections over it; what it samples is sampled by transformers on the same GPU."""
    sections["engines"] = {"generator": {"group": "devices"}} | sections.get("engines", {})
    pipeline = {
        "extends": recipe,
        "name": "gpu",
        "model": {"init": MODEL},
        "groups": {"devices": DEVICES, "rollout": None},
        "run": {"steps": 3, "save_every": 3, "validate_every": 3},
        "track": ["console"],
        **sections,
    }
    file = folder / "pipeline.yaml"
    file.write_text(yaml.safe_dump(pipeline, sort_keys=False))
    run = lab.start(file, folder / "run", *overrides)
    assert run.wait() == 0, run.output
    assert run.left_behind() == []
    return run


def test_ppo_with_a_critic_and_two_reward_models_continues_from_its_checkpoint(lab, tmp_path: Path) -> None:
    megatron = {"backend": "megatron", "group": "devices", "model": {"init": SMALLER}}
    engines = {
        "critic": {**megatron, "optimizer": {"lr": 1e-3}},
        "scorer": {**megatron, "head": "reward"},
        "judge": {"backend": "hf", "group": "devices", "head": "reward", "max_batch_size": 64},
    }
    nodes = {
        "scored": {"op": "reward_model", "engine": "scorer", "write": "scored"},
        "judged": {"op": "reward_model", "engine": "judge", "write": "judged"},
        "critic": {"mini_batch": 16},
        "update": {"mini_batch": 32, "critic_warmup": 1},
    }
    start(lab, tmp_path, ["ppo", "tiny"], engines=engines, nodes=nodes)
    run = start(lab, tmp_path, ["ppo", "tiny"], "run.steps=5", engines=engines, nodes=nodes)
    assert "going on after step 3" in run.output
    lines = [line for line in run.metrics() if line["step"]]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for line in lines:
        assert line["critic/loss"] > 0 and 0 < line["critic/grad_norm"] < 1e3
        assert all(math.isfinite(line[name]) for name in ("values/mean", "reward/scored", "reward/judged"))
        assert abs(line["kl/in_reward"]) < 1
    # Its head begins with zeros, and learns.
    assert lines[0]["values/mean"] == 0 != lines[1]["values/mean"]
    assert abs(lines[4]["values/mean"] - lines[4]["returns/mean"]) < 0.3
    assert "grad_norm" not in lines[0], "the policy waits for its critic"
    for line in lines[1:]:
        assert 0 < line["grad_norm"] < 1e3 and line["mismatch/logprob_diff/mean"] < 0.05


def test_responses_are_learned(lab, tmp_path: Path) -> None:
    metrics = start(lab, tmp_path, ["tiny_sft"]).metrics()
    losses = [line["loss/sft"] for line in metrics if line["step"]]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert metrics[-1]["val/loss/sft"] < losses[0] and "val/reward/mean" in metrics[-1]


def test_preferred_responses_get_likelier(lab, tmp_path: Path) -> None:
    engines = {"generator": None, "reference": {"backend": "megatron", "frozen_copy_of": "actor"}}
    metrics = start(lab, tmp_path, ["tiny_dpo"], engines=engines).metrics()
    steps = [line for line in metrics if line["step"]]
    assert steps[0]["loss/dpo"] == pytest.approx(math.log(2), abs=1e-2)
    assert steps[0]["dpo/margin"] == pytest.approx(0, abs=1e-2) and steps[-1]["dpo/margin"] > steps[0]["dpo/margin"]
    assert metrics[-1]["val/dpo/accuracy"] > 0.5


def test_experts_are_imitated(lab, tmp_path: Path) -> None:
    nodes = {"update": {"loss": {"sft_coef": 0.5}}}
    metrics = start(lab, tmp_path, ["mix", "tiny"], data=GIVEN, nodes=nodes).metrics()
    steps = [line for line in metrics if line["step"]]
    assert steps[-1]["loss/sft"] < steps[0]["loss/sft"]
    assert all(line["reward/mean"] < 0.5 and line["mismatch/logprob_diff/mean"] < 0.05 for line in steps)
