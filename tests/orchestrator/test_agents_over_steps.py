"""Agents in the middle of their work go on in the next step, while some of them, and a generator, are killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from typing import Any

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow
NEEDED, BEGUN, N, STEPS = 4, 8, 2, 6
PROGRAM = """
import json, os, random, signal, sys, time, urllib.request

row = json.load(sys.stdin)
dice = random.Random(row["seed"])
with open("begun", "a") as file:
    file.write(json.dumps([os.getpid(), os.environ["OPENAI_API_KEY"]]) + "\\n")
if dice.random() < 0.3:
    signal.setitimer(signal.ITIMER_REAL, dice.uniform(0.001, 0.6))
messages = row["messages"]
for turn in range(3):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"messages": messages, "max_tokens": 3}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [said, {"role": "user", "content": "+1="}]
    # Every other prompt is in the middle when the others are enough.
    time.sleep(1.0 if row["extra_info"]["index"] % 2 else 0.1)
with open(os.environ["DAGRL_RESULT"], "w") as file:
    json.dump({"reward": float(said["content"][:1] in "02468")}, file)
"""


@pytest.fixture(scope="module")
def run(lab, tmp_path_factory) -> Any:
    """A run, one of whose generators is killed."""
    folder = tmp_path_factory.mktemp("agents")
    pipeline = lab.tiny_pipeline()
    del pipeline["nodes"]["ref"], pipeline["engines"]["reference"], pipeline["nodes"]["update"]["loss"]
    pipeline["nodes"]["rollout"] |= {
        "n": N,
        "over_sampling_batch_size": BEGUN,
        "partial_rollout": True,
        "partial_rollout_max_age": 3,
        "agent": {"command": [sys.executable, "program.py"]},
        "sampling": {"max_new_tokens": 20},
    }
    pipeline["nodes"]["reward"] = {"op": "reward", "fn": "agent"}
    pipeline["groups"]["rollout"] = {"cpus_per_node": 2}
    pipeline["data"] |= {"prompts_per_step": NEEDED, "shuffle": False}
    del pipeline["data"]["val"]
    pipeline["run"] = {"steps": STEPS, "seed": 3}
    path = lab.write_pipeline(folder, pipeline)
    (folder / "program.py").write_text(PROGRAM)
    run = lab.start(path, folder / "run")
    run.wait_for_step(3)
    os.kill(json.loads((run.folder / "workers.json").read_text())["generator/1"]["pid"], signal.SIGKILL)
    assert run.wait() == 0, run.output
    return run


def samples(run: Any, step: int) -> list[dict]:
    return pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pylist()


def test_each_row_is_there_once_whoever_was_killed(run) -> None:
    assert run.metrics()[-1]["run/restarts"] == 1
    killed = 0
    trained: Counter[str] = Counter()
    for step in range(1, STEPS + 1):
        rows = samples(run, step)
        assert len({row["sample_id"] for row in rows}) == len(rows) == NEEDED * N
        assert Counter(row["group_id"] for row in rows) == dict.fromkeys({row["group_id"] for row in rows}, N)
        trained.update(prompt for _, prompt in {(row["group_id"], row["prompt"]) for row in rows})
        for row in rows:
            killed += row["finish_reason"] == "error"
            assert row["excluded"] == (row["finish_reason"] == "error")
            assert len(row["turns"]) == 5 or row["excluded"]
    assert killed >= 8, "agents die at random moments"
    # Sixteen prompts are an epoch. None is lost: those that wait come first.
    assert trained.total() == STEPS * NEEDED and max(trained.values()) <= 3
    assert run.left_behind() == []


def test_agents_go_on_with_tokens_of_older_weights(run) -> None:
    mixed = 0
    for line in run.metrics():
        for row in samples(run, line["step"]):
            versions = [version for version in row["token_version"] if version >= 0]
            assert versions == sorted(versions) and max(versions, default=0) <= line["step"] - 1
            mixed += len(set(versions)) > 1
        assert line["mismatch/logprob_diff/max"] < 1e-4 or line["staleness/max"] > 0
    assert mixed >= 4, "an agent whose turns are of several policies went on"
    assert any(line["rollout/begun_token_fraction"] > 0 for line in run.metrics())


def test_an_agent_that_goes_on_is_not_started_again(run) -> None:
    begun = [json.loads(line) for line in (run.folder.parent / "begun").read_text().splitlines()]
    assert len({key for _, key in begun}) == len(begun)
    prompts = STEPS * NEEDED + BEGUN - NEEDED
    # Those of the generator that was killed begin again, and those that were too old.
    again = len(begun) - prompts * N
    outdated = sum(line["rollout/outdated_fraction"] * NEEDED * N for line in run.metrics())
    assert again <= BEGUN * N + outdated
