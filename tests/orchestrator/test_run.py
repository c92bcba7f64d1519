"""A whole run: what it writes, what runs at once, and that nothing is left of it."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import yaml

pytestmark = pytest.mark.slow

CONTRACT = {
    "step",
    "reward/mean",
    "reward/std",
    "response_tokens/mean",
    "loss/policy",
    "kl/ref",
    "entropy",
    "ratio/mean",
    "ratio/clip_fraction",
    "grad_norm",
    "lr",
    "policy_version",
    "staleness/max",
    "time/step_s",
    "time/rollout_s",
    "time/reward_s",
    "time/ref_s",
    "time/update_s",
    "throughput/tokens_per_s",
    "throughput/tokens_per_s_per_gpu",
    "throughput/rollout_tokens_per_s_per_gpu",
    "throughput/ref_tokens_per_s_per_gpu",
    "throughput/update_tokens_per_s_per_gpu",
}


def events(run, name: str) -> list[dict]:
    timeline = json.loads((run.folder / "timeline.json").read_text())
    return [event for event in timeline if event["ph"] == "X" and event["name"] == name]


def span(event: dict) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def test_metrics_have_the_names_of_the_contract_one_line_a_step(unbroken):
    metrics = unbroken.metrics()
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    for line in metrics:
        assert set(line) >= CONTRACT
        assert line["policy_version"] == line["step"]
        assert line["staleness/max"] == 0
        assert line["lr"] == pytest.approx(1e-3)
    assert [line["step"] for line in metrics if "val/reward/mean" in line] == [3, 6]


def test_each_engine_is_reported_when_it_is_ready(unbroken):
    assert all(f"{name} is ready, after " in unbroken.output for name in ("actor", "generator"))


def test_tokens_a_second_are_those_that_the_step_was_made_of(unbroken):
    for line in unbroken.metrics():
        sampled = line["response_tokens/mean"] * 32
        # Every prompt is four tokens, such as "1+2=".
        tokens = sampled + 32 * 4

        def processed(node: str, line=line) -> float:
            return line[f"throughput/{node}_tokens_per_s_per_gpu"] * line[f"time/{node}_s"]

        # Each executor is one rank, and its shards come one after the other.
        assert processed("rollout") == pytest.approx(sampled)
        assert [processed(node) for node in ("old", "ref", "update")] == pytest.approx([tokens] * 3)
        assert line["throughput/tokens_per_s_per_gpu"] == line["throughput/tokens_per_s"] / 2
        if "val/reward/mean" not in line:
            assert line["throughput/tokens_per_s"] * line["time/step_s"] == pytest.approx(tokens)
        # A CPU has no peak to compare with, and no memory of its own.
        assert not [name for name in line if name.startswith(("mfu/", "memory/"))]


def test_the_first_update_starts_from_the_reference(unbroken):
    first = unbroken.metrics()[0]
    assert first["kl/old"] < 1e-3
    # The second of its two mini-batches has moved a little already.
    assert abs(first["kl/ref"]) < 1e-2
    assert first["ratio/mean"] == pytest.approx(1, abs=1e-2)


def test_reward_and_reference_run_at_the_same_time(unbroken):
    # Of whatever shards: the one worker of the host takes them one after the other, the engine all that are there.
    together = set()
    for reward in events(unbroken, "reward"):
        (start, end), step = span(reward), reward["args"]["step"]
        references = [span(e) for e in events(unbroken, "ref") if e["args"]["step"] == step]
        together |= {step for begun, ended in references if begun < end and start < ended}
    assert len(together) >= 4


def test_a_row_wise_node_starts_on_a_finished_shard_while_others_are_still_sampled(unbroken):
    early = 0
    for step in range(1, 7):
        last_rollout = max(span(e)[1] for e in events(unbroken, "rollout") if e["args"]["step"] == step)
        early += min(span(e)[0] for e in events(unbroken, "reward") if e["args"]["step"] == step) < last_rollout
    assert early >= 4


def test_the_timeline_has_one_event_for_each_node_and_shard(unbroken):
    for name in ("rollout", "reward", "ref", "old", "advantage"):
        found = [(e["args"]["step"], e["args"]["shard"]) for e in events(unbroken, name)]
        assert sorted(found) == [(step, shard) for step in range(1, 7) for shard in range(2)], name
    for event in events(unbroken, "update"):
        assert event["args"]["group"] == "train"
        assert event["args"]["worker"] == "actor/0"


def test_samples_show_the_policys_turns(unbroken):
    samples = pq.read_table(unbroken.folder / "samples" / "step_4.parquet").to_pylist()
    assert len(samples) == 32
    for sample in samples:
        left, right = sample["prompt"].rstrip("=").split("+")
        assert sample["answer"] == str(int(left) + int(right))
        assert sample["reward"] == float(sample["response"].replace("<eos>", "") == sample["answer"])


def test_the_run_folder_holds_the_resolved_pipeline_and_the_newest_checkpoints(unbroken):
    resolved = yaml.safe_load((unbroken.folder / "pipeline.yaml").read_text())
    assert resolved["name"] == "tiny"
    checkpoints = sorted(folder.name for folder in (unbroken.folder / "checkpoints").iterdir())
    assert checkpoints == ["step_2", "step_4", "step_6"]


def test_nothing_is_left_behind(unbroken):
    assert unbroken.left_behind() == []


def test_a_finished_run_says_so_and_changes_nothing(unbroken, lab):
    before = unbroken.metrics()
    again = lab.start(unbroken.folder.parent / "pipeline.yaml", unbroken.folder)
    assert again.wait() == 0
    assert "finished step 6" in again.output
    assert unbroken.metrics() == before
