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
NEEDED, BEGUN, N = 4, 8, 2
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


LIVES = [
    pytest.param([(6, [3])], id="short"),
    # The second is taken up from the checkpoint of the first.
    pytest.param([(12, [3, 6, 9]), (24, [15, 18, 21])], id="long", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
]
"""For each life of a run its last step, and the steps after which a generator is killed."""


@pytest.fixture(scope="module", params=LIVES)
def run(request, lab, tmp_path_factory) -> Any:
    """A run whose generators are killed one after the other."""
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
    pipeline["data"] |= {"prompts_per_step": NEEDED, "order": "file"}
    del pipeline["data"]["val"]
    pipeline["run"] = {"seed": 3}
    path = lab.write_pipeline(folder, pipeline)
    (folder / "program.py").write_text(PROGRAM)
    for last, kills in request.param:
        run = lab.start(path, folder / "run", f"run.steps={last}")
        for number, step in enumerate(kills):
            run.wait_for_step(step)
            workers = json.loads((run.folder / "workers.json").read_text())
            os.kill(workers[f"generator/{(number + 1) % 2}"]["pid"], signal.SIGKILL)
        assert run.wait() == 0, run.output
        assert run.metrics()[-1]["run/restarts"] == len(kills)
    run.lives = len(request.param)
    run.kills = sum(len(kills) for _, kills in request.param)
    return run


def samples(run: Any, step: int) -> list[dict]:
    return pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pylist()


def test_each_row_exists_once_after_any_worker_was_killed(run) -> None:
    killed, steps = 0, len(run.metrics())
    trained: Counter[str] = Counter()
    for step in range(1, steps + 1):
        rows = samples(run, step)
        assert len({row["sample_id"] for row in rows}) == len(rows) == NEEDED * N
        assert Counter(row["group_id"] for row in rows) == dict.fromkeys({row["group_id"] for row in rows}, N)
        trained.update(prompt for _, prompt in {(row["group_id"], row["prompt"]) for row in rows})
        for row in rows:
            killed += row["finish_reason"] == "error"
            assert row["excluded"] == (row["finish_reason"] == "error")
            assert len(row["turns"]) == 5 or row["excluded"]
    assert killed >= steps, "agents die at random moments"
    # Sixteen prompts are an epoch. None is lost: those that wait come first.
    assert trained.total() == steps * NEEDED and max(trained.values()) <= -(-(steps * NEEDED + BEGUN) // 16)
    assert run.left_behind() == []


def test_agents_continue_with_tokens_of_older_weights(run) -> None:
    mixed = 0
    for line in run.metrics():
        for row in samples(run, line["step"]):
            versions = [version for version in row["token_version"] if version >= 0]
            assert versions == sorted(versions) and max(versions, default=0) <= line["step"] - 1
            mixed += len(set(versions)) > 1
        assert line["mismatch/logprob_diff/max"] < 1e-4 or line["staleness/max"] > 0
    assert mixed >= 4, "an agent whose turns are of several policies went on"
    assert any(line["rollout/begun_token_fraction"] > 0 for line in run.metrics())


def test_an_agent_that_continues_is_not_started_again(run) -> None:
    begun = [json.loads(line) for line in (run.folder.parent / "begun").read_text().splitlines()]
    assert len({key for _, key in begun}) == len(begun)
    prompts = len(run.metrics()) * NEEDED + BEGUN - NEEDED
    # Those of a generator that was killed begin again, those of a run that is resumed, and those that were too old.
    again = len(begun) - prompts * N
    outdated = sum(line["rollout/outdated_fraction"] * NEEDED * N for line in run.metrics())
    assert again <= (run.kills + run.lives - 1) * BEGUN * N + outdated
