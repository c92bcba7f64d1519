"""Runs that learn from the data set's responses: nothing is sampled but in validation, and pairs stay pairs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

SMALL = ("run.steps=4", "run.validate_every=2", "run.save_every=2", "track=[console]")


def start(lab, folder: Path, template: str, *overrides: str) -> Any:
    path = folder / "tiny.yaml"
    path.write_text(f"extends: {template}\nname: offline\n")
    return lab.start(path, folder / "run", *SMALL, *overrides)


def test_responses_are_learned_and_only_validation_samples(lab, tmp_path: Path) -> None:
    run = start(lab, tmp_path, "tiny_sft", "nodes.sft.mini_batch=5")
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4]
    losses = [line["loss/sft"] for line in metrics[1:]]
    # Five optimizer steps in each, on 25 sums of one digit and an end token.
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
    for line in metrics:
        validated = line["step"] % 2 == 0
        assert ("val/loss/sft" in line, "val/reward/mean" in line) == (validated, validated)
        assert "reward/mean" not in line and "response_tokens/mean" not in line
        assert "time/rollout_s" not in line
    # The loss of the validation set, which is the training set, by the weights after the step.
    assert metrics[4]["val/loss/sft"] < metrics[3]["loss/sft"]
    events = json.loads((run.folder / "timeline.json").read_text())
    sampled = {event["args"]["step"] for event in events if event.get("cat") == "rollout"}
    assert sampled == {0, 2, 4}
    written = pq.read_table(run.folder / "samples" / "step_3.parquet").to_pylist()
    assert {(row["prompt"], row["demonstration"]) for row in written} >= {("2+2=", "4<eos>"), ("0+1=", "1<eos>")}
    assert "loss of sft" in run.output


@pytest.fixture(scope="module")
def pairs(lab, tmp_path_factory) -> Any:
    """Four steps of DPO, the pairs shared out to two data-parallel ranks."""
    run = start(lab, tmp_path_factory.mktemp("dpo"), "tiny_dpo", "groups.devices.cpus_per_node=2")
    assert run.wait() == 0, run.output
    return run


def test_what_is_preferred_gets_likelier_than_what_is_not(pairs) -> None:
    metrics = pairs.metrics()
    margins = [line["dpo/margin"] for line in metrics[1:]]
    assert margins[0] == pytest.approx(0.0, abs=1e-6), "the policy begins as the reference"
    assert margins == sorted(margins) and margins[-1] > 0.02
    assert metrics[1]["loss/dpo"] == pytest.approx(0.693147, abs=1e-5)
    assert metrics[-1]["val/dpo/accuracy"] > 0.8
    assert metrics[-1]["val/loss/dpo"] < metrics[0]["val/loss/dpo"]
    written = pq.read_table(pairs.folder / "samples" / "step_4.parquet").to_pylist()
    by_prompt: dict[int, list[str]] = {}
    for row in written:
        by_prompt.setdefault(row["group_id"], []).append(row["demonstration"].removesuffix("<eos>"))
    assert all(int(wrong) == int(right) + 1 for right, wrong in by_prompt.values())


@pytest.mark.soak
def test_it_goes_on_from_a_checkpoint_with_the_same_numbers(lab, pairs, tmp_path: Path) -> None:
    shutil.copytree(pairs.folder, tmp_path / "run", symlinks=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_4")
    run = start(lab, tmp_path, "tiny_dpo", "groups.devices.cpus_per_node=2")
    assert run.wait() == 0, run.output
    assert "going on after step 2" in run.output
    assert lab.comparable(run.metrics()) == lab.comparable(pairs.metrics())


@pytest.mark.soak
def test_experts_are_imitated_and_not_compared_with(lab, tmp_path: Path) -> None:
    given = ("data.responses=[reward_model.ground_truth]", "data.max_response_tokens=3")
    run = start(lab, tmp_path, "[mix, tiny]", *given, "nodes.update.loss.sft_coef=0.5")
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    imitated = [line["loss/sft"] for line in metrics[1:]]
    assert imitated == sorted(imitated, reverse=True)
    for line in metrics[1:]:
        # Every expert is right, and none of them is counted.
        assert line["reward/mean"] < 0.2
        assert line["mismatch/logprob_diff/max"] < 1e-4
    rows = pq.read_table(run.folder / "samples" / "step_4.parquet").to_pylist()
    experts = [row for row in rows if row["is_expert"]]
    assert len(experts) == len(rows) // 16
    assert all(row["reward"] == 1.0 and row["advantage"] == 0.0 for row in experts)
    assert all(row["response"] == f"{row['answer']}<eos>" for row in experts)
