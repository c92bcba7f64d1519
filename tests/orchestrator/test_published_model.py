"""SmolLM2-135M-Instruct on CPUs: one step of SFT on word problems, then one of GRPO from its weights."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
ON_CPUS: dict[str, Any] = {
    "data": {"prompts_per_step": 4, "val_prompts": 4},
    "groups": {"devices": {"gpus_per_node": 0, "cpus_per_node": 1}},
    "engines": {"generator": {"backend": "hf", "server": None}},
    "nodes": {"rollout": {"sampling": {"max_new_tokens": 24}}},
    "run": {"steps": 1, "save_every": 1, "validate_every": 1, "start_timeout_s": 500},
    "track": ["console"],
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """A folder with the word problems, and pipelines that lay `ON_CPUS` over the templates."""
    folder = tmp_path_factory.mktemp("project")
    sys.path.insert(0, str(REPOSITORY / "data_preprocess"))
    try:
        from word_problems import main

        main(["--local_dir", str(folder / "data" / "word_problems"), "--train", "32", "--test", "8"])
    finally:
        sys.path.remove(str(REPOSITORY / "data_preprocess"))
    for name in ("sft", "grpo"):
        own = ON_CPUS | {"extends": f"smollm2_{name}", "name": f"smollm2-{name}", "model": {"path": str(smollm2)}}
        own = own | {"run": own["run"] | {"validate_first": name == "sft"}}
        if name == "grpo":
            start = str(folder / "runs" / "smollm2-sft" / "checkpoints" / "step_1" / "actor")
            own["engines"] = own["engines"] | {"actor": {"dist_checkpointing_path": start}}
            own["nodes"] = {"rollout": own["nodes"]["rollout"] | {"n": 2}, "update": {"mini_batch": 4}}
            # A checkpoint of two GB, and greedy responses, are the other run's.
            own["run"] |= {"save_every": None, "validate_every": None}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(own))
    (folder / "runs").mkdir()
    return folder


@pytest.fixture(scope="module")
def fine_tuned(lab: Any, project: Path) -> Any:
    run = lab.start(project / "sft.yaml", project / "runs" / "smollm2-sft")
    assert run.wait() == 0, run.output
    return run


@pytest.mark.slow
def test_a_step_of_sft_lowers_the_loss_of_the_test_set(fine_tuned: Any) -> None:
    before, after = fine_tuned.metrics()
    # 1.6 nats a token: what an instruction-tuned model of this size gives to text that it has not seen.
    assert 0.8 < before["val/loss/sft"] < 2.5
    assert after["val/loss/sft"] < before["val/loss/sft"] - 0.005


@pytest.mark.slow
def test_greedy_responses_read_as_english(fine_tuned: Any) -> None:
    rows = pq.read_table(fine_tuned.folder / "samples" / "step_0_val.parquet").to_pylist()
    usual = {"a", "an", "and", "are", "find", "first", "in", "is", "left", "of", "so", "the", "to", "we"}
    words = []
    for row in rows:
        assert row["prompt"].startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        usual |= set(re.findall(r"[a-z]+", row["prompt"].lower()))
        words += re.findall(r"[a-z]+", row["response"].lower())
    assert len(words) > 20 and sum(word in usual for word in words) > len(words) / 2, rows


@pytest.mark.slow
def test_grpo_starts_from_the_weights_of_sft(lab: Any, project: Path, fine_tuned: Any) -> None:
    run = lab.start(project / "grpo.yaml", project / "runs" / "smollm2-grpo")
    assert run.wait() == 0, run.output
    (line,) = run.metrics()
    # Both engines compute in float32, and the reference has the weights that training starts from.
    assert line["mismatch/logprob_diff/max"] < 1e-3
    assert line["kl_ref/mean"] == pytest.approx(0.0, abs=1e-6) if "kl_ref/mean" in line else True
    assert 1.0 < line["entropy"] < 4.0
