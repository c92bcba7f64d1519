"""An update that takes its mini-batches as they come, beside the same run with an update that waits for all of them."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(lab, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    pipeline = lab.tiny_pipeline()
    del pipeline["nodes"]["old"]
    pipeline["nodes"]["update"]["read"] = {"old_logprob": "rollout_logprob"}
    pipeline["nodes"]["rollout"]["sampling"] = {"max_new_tokens": 24, "ignore_eos": True}
    pipeline["nodes"]["reward"]["fn"] = "rewards:even"
    pipeline["schedule"] = {"shards_per_step": 4}
    pipeline["run"] = {"steps": 3, "seed": 3, "start_timeout_s": 500}
    path = lab.write_pipeline(folder, pipeline)
    found = {}
    for streams in (False, True):
        run = lab.start(path, folder / f"run_{streams}", f"schedule.stream_update={str(streams).lower()}")
        assert run.wait() == 0, run.output
        found[streams] = run
    return found


def spans(run, name: str, step: int) -> list[tuple[float, float]]:
    timeline = json.loads((run.folder / "timeline.json").read_text())
    found = [each for each in timeline if each["ph"] == "X" and each["name"] == name and each["args"]["step"] == step]
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in found)


def test_it_is_the_same_training_to_the_last_digit(runs, lab):
    at_once, streamed = (lab.comparable(runs[streams].metrics()) for streams in (False, True))
    assert len(at_once) == 3
    # The second mini-batch of a step is trained on with weights that the first has moved.
    assert all(line["grad_norm"] > 0.01 and line["kl/old"] > 0 for line in at_once)
    assert streamed == at_once


def test_the_first_mini_batch_is_trained_on_before_the_last_response_is_there(runs):
    pieces = {step: spans(runs[True], "update", step) for step in (1, 2, 3)}
    assert {len(each) for each in pieces.values()} == {2}
    assert {len(spans(runs[False], "update", step)) for step in pieces} == {1}
    assert any(each[0][0] < max(end for _, end in spans(runs[True], "rollout", step)) for step, each in pieces.items())
