"""More prompts than a step needs: the slowest are aborted, come first in the next step, and none is ever lost.

Such a run is killed and goes on in test_async.py.
"""

from __future__ import annotations

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow

NEEDED, BEGUN, STEPS, TOKENS = 8, 16, 5, 20


GENERATORS = [
    pytest.param({"max_batch_size": 16}, id="hf"),
    # Fewer at a time than a server gets: it has some in hand when there are enough.
    pytest.param(
        {"backend": "sglang", "max_batch_size": None, "server": {"max_running_requests": 8}},
        id="sglang",
        marks=pytest.mark.soak,
    ),
]


@pytest.fixture(scope="module", params=GENERATORS)
def run(request, lab, tmp_path_factory):
    pipeline = lab.tiny_pipeline()
    del pipeline["nodes"]["ref"], pipeline["engines"]["reference"], pipeline["nodes"]["update"]["loss"]
    pipeline["nodes"]["rollout"] |= {
        "over_sampling_batch_size": BEGUN,
        "partial_rollout": True,
        # All are as long, so that a step's last prompts are being sampled when there are enough.
        "sampling": {"max_new_tokens": TOKENS, "ignore_eos": True},
    }
    pipeline["engines"]["generator"] |= request.param
    pipeline["groups"]["rollout"] = {"cpus_per_node": 2}
    pipeline["run"] = {"steps": STEPS, "seed": 3, "save_every": 3}
    folder = tmp_path_factory.mktemp("partial")
    run = lab.start(lab.write_pipeline(folder, pipeline), folder / "run")
    assert run.wait() == 0, run.output
    return run


def samples(run, step: int) -> list[dict]:
    return pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pylist()


def test_a_step_has_as_many_prompts_as_it_needs_each_with_all_its_samples(run):
    for step in range(1, STEPS + 1):
        rows = samples(run, step)
        assert Counter(row["group_id"] for row in rows) == dict.fromkeys({row["group_id"] for row in rows}, 4)
        assert len(rows) == 4 * NEEDED
        assert {len(row["response_tokens"]) for row in rows} == {TOKENS}
        assert {row["finish_reason"] for row in rows} == {"length"}


def test_no_prompt_is_lost_by_an_abort(run):
    state = json.loads((run.folder / "checkpoints" / "step_3" / "state.json").read_text())
    order = json.loads((run.folder / "checkpoints" / "step_3" / "order.json").read_text())
    assert (order["passed"], len(state["carried"])) == (3 * NEEDED + 8, 8)
    trained: Counter[str] = Counter()
    for step in range(1, STEPS + 1):
        # A prompt that was carried and the same one of the next epoch are two groups.
        trained.update(prompt for _, prompt in {(row["group_id"], row["prompt"]) for row in samples(run, step)})
        metrics = run.metrics()[step - 1]
        assert metrics["samples/trained"] == 4 * NEEDED and metrics["tokens/trained"] == 4 * NEEDED * TOKENS
        assert 0 < metrics["samples/carried_out"] <= 4 * (BEGUN - NEEDED)
        assert metrics["tokens/unused"] == metrics["tokens/failed"] == 0
        assert metrics["rollout/carried_prompts"] == (0 if step == 1 else BEGUN - NEEDED)
    # By now three epochs of sixteen prompts were begun, and the last eight prompts wait.
    assert trained.total() == STEPS * NEEDED
    assert max(trained.values()) <= 3


def test_responses_continue_with_tokens_of_older_weights(run):
    metrics = run.metrics()
    assert metrics[0]["rollout/begun_token_fraction"] == 0
    gone_on = [line for line in metrics if line["rollout/begun_token_fraction"] > 0]
    assert gone_on, "an abort finds prompts that are being sampled"
    for line in metrics:
        versions = {row["policy_version"] for row in samples(run, line["step"])}
        assert versions <= set(range(line["step"]))
        assert line["staleness/max"] == line["step"] - 1 - min(versions)
        assert line["staleness/max"] <= 4
        # Not the other way round: a response may go on to its end just after others, and be left for the next step.
        if line["staleness/max"] > 0:
            assert line["rollout/begun_token_fraction"] > 0
    assert any(line["staleness/max"] > 0 for line in metrics)


def test_each_token_has_the_version_of_the_weights_that_sampled_it(run):
    mixed = 0
    for line in run.metrics():
        for row in samples(run, line["step"]):
            versions = row["token_version"]
            assert len(versions) == len(row["response_tokens"]) and versions == sorted(versions)
            assert min(versions) == row["policy_version"] and max(versions) <= line["step"] - 1
            mixed += len(set(versions)) > 1
        assert line["staleness/tokens/mean"] <= line["staleness/mean"]
    assert mixed, "no response was continued by newer weights"
