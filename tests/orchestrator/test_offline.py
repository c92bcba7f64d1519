"""Runs that learn from the data set's responses: nothing is sampled but in validation, and pairs stay pairs."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

RECORD = "run.record=[ref, dpo]"
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
    run = start(lab, tmp_path_factory.mktemp("dpo"), "tiny_dpo", "groups.devices.cpus_per_node=2", RECORD)
    assert run.wait() == 0, run.output
    return run


def test_preferred_responses_get_likelier_than_rejected_ones(pairs) -> None:
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


def test_a_step_is_replayed_to_the_bit_from_a_checkpoint(lab, pairs) -> None:
    replayed = lab.call("replay", pairs.folder, "--step", 3)
    assert replayed.returncode == 0, replayed.stderr + replayed.stdout
    assert "actor from the state after step 2\n" in replayed.stdout
    assert "compared of ref: ref_logprob" in replayed.stdout
    assert "compared of dpo: 8 metrics, 25 tensors of weights" in replayed.stdout
    assert "equal to the bit" in replayed.stdout and "warning" not in replayed.stderr


def test_an_update_in_another_layout_agrees_within_rounding(lab, pairs) -> None:
    layout = ("--layout", "tensor_model_parallel_size=2", "--within", "1e-6")
    replayed = lab.call("replay", pairs.folder, "--step", 2, "--node", "dpo", *layout)
    assert replayed.returncode == 0, replayed.stderr + replayed.stdout
    assert "actor from its start weights, through the updates of step 1" in replayed.stdout
    assert re.search(r"dpo: metric grad_norm: [\d.]+ and [\d.]+\n", replayed.stdout)
    assert re.search(r"dpo: weights: \d+ of 25 tensors differ; norms by at most \S+e-\d+ of", replayed.stdout)
    assert replayed.stdout.endswith("agrees within 1e-06\n")


def test_a_fault_in_one_rank_is_named(lab, pairs, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    short = ("run.steps=1", "run.validate_first=false", "run.validate_every=null", "data.val=null")
    run = start(lab, tmp_path, "tiny_dpo", "groups.devices.cpus_per_node=2", RECORD, *short)
    assert run.wait() == 0, run.output
    found = lab.call("diff", pairs.folder, run.folder)
    assert found.returncode == 1, found.stderr + found.stdout
    # One in each of the two shards.
    told = re.search(r"column ref_logprob: 2 of 50 rows differ \((\d+), \d+\); row (\d+), value \d: -", found.stdout)
    assert told is not None and told[1] == told[2]
    assert "part in step 1, at node ref" in found.stdout and "all of them are from actor/1" in found.stdout
    assert "its inputs are equal" in found.stdout
    # In a run without records there is less to see.
    shutil.rmtree(run.folder / "records")
    found = lab.call("diff", pairs.folder, run.folder)
    assert found.returncode == 1 and "part in step 1\n" in found.stdout and "metric " in found.stdout


FAULT = """
import importlib.abc
import importlib.util
import sys

ENGINE = "dagrl.backends.megatron.engine.megatron_engine"


class Finder(importlib.abc.MetaPathFinder):
    # Rank 1 returns one log-prob whose last bit is another.
    def find_spec(self, name, path, target=None):
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            whole = module.MegatronEngine.logprobs

            def logprobs(self, batch, **options):
                import numpy as np
                import torch

                column = whole(self, batch, **options)
                if torch.distributed.get_rank() == 1 and len(batch):
                    column.values[-1] = np.nextafter(column.values[-1], np.float32(0))
                return column

            module.MegatronEngine.logprobs = logprobs

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""
"""A module that workers import first, in a run with a fault."""


@pytest.mark.soak
def test_it_continues_from_a_checkpoint_with_the_same_numbers(lab, pairs, tmp_path: Path) -> None:
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
