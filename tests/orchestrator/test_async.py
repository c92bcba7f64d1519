"""Rollouts a step ahead of training: overlap, age of samples, and the state after a stop and after a kill."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dagrl.tracking.metrics_file import accounts

pytestmark = pytest.mark.slow

STEPS = 8
PROMPTS = 16
"""Prompts of the data set; a step takes half of them, so two steps are an epoch."""


def ahead(lab, **schedule: Any) -> dict[str, Any]:
    """The tiny pipeline with rollouts a step ahead, clipped against the weights that sampled."""
    pipeline = lab.tiny_pipeline()
    del pipeline["nodes"]["old"], pipeline["nodes"]["update"]["mini_batch"]
    pipeline["nodes"]["update"]["rollout_correction"] = {"rollout_is": "token"}
    # Long enough to be seen, and all alike.
    pipeline["nodes"]["rollout"]["sampling"] = {"max_new_tokens": 24, "ignore_eos": True}
    pipeline["nodes"]["reward"]["fn"] = "rewards:even"
    pipeline["schedule"] = {"shards_per_step": 2, "max_staleness": 1} | schedule
    pipeline["run"] |= {"steps": STEPS, "save_every": 100, "validate_every": 4, "samples_per_step": 32}
    return pipeline


def events(run, *names: str) -> list[dict]:
    timeline = json.loads((run.folder / "timeline.json").read_text())
    return [event for event in timeline if event["ph"] == "X" and event["name"] in names]


def span(run, step: int, *names: str) -> tuple[float, float]:
    """When the first of these began in a step, and when the last ended."""
    spans = [(each["ts"], each["ts"] + each["dur"]) for each in events(run, *names) if each["args"]["step"] == step]
    return min(begin for begin, _ in spans), max(end for _, end in spans)


def samples(run, step: int) -> list[dict]:
    return pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pylist()


def prompts(run, *steps: int) -> Counter[str]:
    """How often the run trained on each prompt, with all of its samples."""
    return Counter(
        {prompt: n / 4 for prompt, n in Counter(r["prompt"] for s in steps for r in samples(run, s)).items()}
    )


@pytest.fixture(scope="module")
def run(lab, tmp_path_factory):
    folder = tmp_path_factory.mktemp("async")
    run = lab.start(lab.write_pipeline(folder, ahead(lab)), folder / "run")
    assert run.wait() == 0, run.output
    return run


def test_the_next_steps_rollout_runs_while_a_step_is_trained_on(run):
    overlapping = [
        step
        for step in range(1, STEPS)
        if span(run, step + 1, "rollout")[0] < span(run, step, "ref", "update")[1]
        and span(run, step, "ref", "update")[0] < span(run, step + 1, "rollout")[1]
    ]
    # The step after a validation waits for it.
    assert len(overlapping) > STEPS / 2


def test_samples_are_one_version_behind_and_never_more(run):
    for line in run.metrics():
        versions = {row["policy_version"] for row in samples(run, line["step"])}
        assert line["staleness/max"] == line["step"] - 1 - min(versions) <= 1
        assert line["staleness/masked"] == 0
    assert any(line["staleness/max"] == 1 for line in run.metrics())
    assert run.metrics()[0]["staleness/max"] == 0, "nothing is older than the start weights"


def test_steps_are_committed_in_order_and_their_times_add_up_to_the_runs(run):
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    first, last = span(run, 1, "prompts")[0], span(run, STEPS, "update")[1]
    assert sum(line["time/step_s"] for line in metrics) * 1e6 >= last - first
    assert sum(line["time/step_s"] for line in metrics) * 1e6 <= 1.5 * (last - first)


def test_each_epoch_has_each_prompt_once(run):
    for step in range(1, STEPS, 2):
        epoch = prompts(run, step, step + 1)
        assert epoch.total() == PROMPTS and set(epoch.values()) == {1}


def test_row_wise_nodes_begin_with_the_first_shard(run):
    """The reference runs on the trainer's ranks while the generator samples the second shard."""
    assert any(span(run, step, "reward")[0] < span(run, step, "rollout")[1] for step in range(1, STEPS + 1))
    assert any(span(run, step, "ref")[0] < span(run, step, "rollout")[1] for step in range(1, STEPS + 1))


def test_validation_is_on_the_weights_of_its_step(run):
    for step in (4, 8):
        assert "val/reward/mean" in run.metrics()[step - 1]
        assert span(run, step, "val/rollout")[0] > span(run, step, "update")[1]


@pytest.fixture(scope="module")
def lives(lab, tmp_path_factory):
    """A run that begins more prompts than it needs, is killed, resumed, and stopped by Ctrl-C."""
    folder = tmp_path_factory.mktemp("lives")
    pipeline = ahead(lab)
    # In file order, so that a position in the data set identifies its prompt.
    pipeline["data"]["order"] = "file"
    pipeline["nodes"]["rollout"] |= {"over_sampling_batch_size": 12, "partial_rollout": True}
    pipeline["run"] |= {"save_every": 2, "validate_every": None}
    path = lab.write_pipeline(folder, pipeline)
    killed = lab.start(path, folder / "run", "run.steps=1000")
    killed.wait_for_step(5)
    killed.kill()
    assert not killed.left_behind()
    saved = states(killed)
    stopped = lab.start(path, folder / "run", "run.steps=1000")
    stopped.wait_for_step(max(saved) + 3)
    stopped.process.send_signal(signal.SIGINT)
    assert stopped.wait() == 0, stopped.output
    assert "Traceback" not in stopped.output
    return stopped, saved | states(stopped), max(saved) + 1


def states(run) -> dict[int, dict]:
    """The states in the run's checkpoints, by step."""
    found = [
        json.loads(each.read_text()) | {"order": json.loads((each.parent / "order.json").read_text())}
        for each in (run.folder / "checkpoints").glob("step_*/state.json")
    ]
    return {state["step"]: state for state in found}


def test_no_prompt_is_lost_or_doubled_by_a_stop_or_a_kill(lives):
    run, saved, _ = lives
    assert len(saved) >= 3
    with pq.ParquetFile(run.folder.parent / "train.parquet") as file:
        asked = [row["prompt"][0]["content"] for row in file.read().to_pylist()]

    def at(places) -> Counter[str]:
        return Counter(asked[place % PROMPTS] for place in places)

    for step, state in saved.items():
        trained = prompts(run, *range(1, step + 1))
        assert set(trained.values()) <= {float(n) for n in range(1, step + 1)}, "each with all of its samples"
        assert trained + at(state["carried"]) == at(range(state["order"]["passed"])), f"checkpoint {step}"


def test_a_run_with_several_lives_has_each_step_once(lives):
    run, saved, gone_on = lives
    assert [line["step"] for line in run.metrics()] == list(range(1, max(saved) + 1))
    # The rollout one step ahead ended with the run, and the prompts that waited in the killed run started again.
    (whole,) = accounts(run.metrics())
    assert whole.samples["lost"] > 0 and whole.tokens["lost"] > 0
    (before,) = accounts(run.metrics()[: gone_on - 1])
    assert whole.tokens["failed"] == before.tokens["carried"]
    for line in run.metrics():
        assert line["staleness/max"] <= 1 + 4, "begun tokens may be older by partial_rollout_max_age"
        # What had been sampled of the prompts that wait is lost with the life that has sampled it.
        assert line["rollout/begun_token_fraction"] == 0 or line["step"] not in (1, gone_on)


@pytest.mark.soak
def test_the_template_learns_from_samples_that_are_a_version_old(lab, tmp_path):
    template = Path(__file__).parents[2] / "dag_templates" / "async_grpo.yaml"
    overrides = ["run.steps=40", "run.validate_every=null", "run.validate_first=false", "track=[console]"]
    run = lab.start(template, tmp_path / "run", *overrides)
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    rewards = [line["reward/mean"] for line in metrics]
    assert sum(rewards[-5:]) / 5 > 0.2 > 0.05 > sum(rewards[:5]) / 5
    assert max(line["staleness/max"] for line in metrics) == 1
