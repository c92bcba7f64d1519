"""A real SGLang server, on the CPU or a GPU, that gets new weights in the midst of its responses, which go on."""

from __future__ import annotations

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest
import torch

STEPS, TOKENS = 6, 24
ON_GPUS = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(400)]
CASES = [
    pytest.param((pause, on_gpus), id=f"{pause}{'-gpus' if on_gpus else ''}", marks=marks)
    for on_gpus, marks in ((False, pytest.mark.soak), (True, ON_GPUS))
    for pause in ("retract", "in_place")
]


@pytest.fixture(scope="module", params=CASES)
def run(request, lab, benchmark_module, tmp_path_factory):
    """Fewer responses at a time than a step has, so that some begin before new weights come and some after."""
    pause, on_gpus = request.param
    folder = tmp_path_factory.mktemp("in_flight")
    pipeline = lab.tiny_pipeline()
    server = {"max_running_requests": 4}
    if on_gpus:
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        pipeline["groups"] = {name: {"gpus_per_node": 1} for name in ("train", "rollout")}
        # Sizes that kernels are made for.
        pipeline["model"]["init"] |= benchmark_module("learning").CASES["two_gpus_apart"].model
        server |= {"max_running_requests": 2, "mem_fraction_static": 0.3, "max_total_tokens": 65536}
    del pipeline["nodes"]["old"], pipeline["nodes"]["ref"], pipeline["nodes"]["update"]["mini_batch"]
    del pipeline["engines"]["reference"], pipeline["nodes"]["update"]["loss"]
    pipeline["nodes"]["update"]["rollout_correction"] = {"rollout_is": "token"}
    pipeline["nodes"]["rollout"]["sampling"] = {"max_new_tokens": TOKENS, "ignore_eos": True}
    pipeline["nodes"]["reward"]["fn"] = "rewards:even"
    pipeline["engines"]["generator"] = {
        "backend": "sglang",
        "group": "rollout",
        "weights_from": "actor",
        "server": server,
        "weight_sync": {"pause": pause, "checksum": True},
    }
    pipeline["schedule"] = {"shards_per_step": 2, "max_staleness": 1, "in_flight_weight_update": True}
    pipeline["run"] |= {"steps": STEPS, "save_every": None, "validate_every": None, "samples_per_step": 32}
    run = lab.start(lab.write_pipeline(folder, pipeline), folder / "run")
    assert run.wait() == 0, run.output
    return run


def samples(run, step: int) -> list[dict]:
    return pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pylist()


def spans(run, name: str) -> list[tuple[float, float]]:
    timeline = json.loads((run.folder / "timeline.json").read_text())
    found = [event for event in timeline if event["ph"] == "X" and event["name"] == name]
    return [(event["ts"], event["ts"] + event["dur"]) for event in found]


def test_weights_come_while_responses_are_under_way(run):
    rollouts = spans(run, "rollout")
    assert any(begin < start and end < stop for start, end in spans(run, "sync") for begin, stop in rollouts)


def test_each_sample_says_which_weights_its_first_token_is_of(run):
    mixed = 0
    for line in run.metrics():
        versions = Counter(row["policy_version"] for row in samples(run, line["step"]))
        assert set(versions) <= {line["step"] - 2, line["step"] - 1} | {0}
        assert line["staleness/max"] == line["step"] - 1 - min(versions) <= 1
        assert line["staleness/masked"] == 0
        assert line["grad_norm"] > 0.01, "weights move"
        mixed += len(versions) > 1
    assert mixed, "some rollout has samples that began before its new weights came, and some after"


def test_no_response_is_lost_or_cut_by_it(run):
    for step in range(1, STEPS + 1):
        rows = samples(run, step)
        assert len(rows) == 32
        assert {(len(row["response_tokens"]), row["finish_reason"]) for row in rows} == {(TOKENS, "length")}
