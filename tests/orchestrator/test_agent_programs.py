"""Runs whose rollouts are programs: a client that learns the demo's task, a framework, and a process that is killed."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow
TEMPLATE = Path(__file__).parents[2] / "dag_templates" / "tiny_agent.yaml"
PROGRAM = """
import json, os, random, signal, sys, urllib.request

row = json.load(sys.stdin)
if row["sample_id"] % 4 == 2:
    signal.setitimer(signal.ITIMER_REAL, random.Random(row["seed"]).uniform(0.001, 0.2))
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = json.dumps({"messages": row["messages"]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
if row["sample_id"] % 4 == 1:
    os.kill(os.getpid(), signal.SIGKILL)
print("said", said)
with open(os.environ["DAGRL_RESULT"], "w") as file:
    json.dump({"reward": float(said[:1] in "02468"), "length": len(said)}, file)
"""
FRAMEWORK = """
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner

async def solve(client, row):
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    agent = Agent(name="adder", model=model, model_settings=ModelSettings(max_tokens=5))
    config = RunConfig(tracing_disabled=True)
    result = await Runner.run(agent, row["messages"], run_config=config)
    more = [*result.to_input_list(), {"role": "user", "content": "1+1="}]
    again = await Runner.run(agent, more, run_config=config)
    return {"reward": float(row["answer"] in again.final_output), "turns_of_it": len(again.raw_responses)}
"""


def test_the_official_client_trains_the_demos_task(lab, tmp_path: Path) -> None:
    short = ("run.steps=24", "run.validate_every=24", "run.save_every=null", "track=[console]")
    run = lab.start(TEMPLATE, tmp_path / "run", *short)
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    # Of 25 sums. The template's 100 steps reach 0.9.
    assert metrics[0]["val/reward/mean"] < 0.1 and metrics[-1]["val/reward/mean"] > 0.2
    for line in metrics[1:]:
        # The trainer's log-probs of the replies equal the generator's.
        assert line["mismatch/logprob_diff/max"] < 1e-4
        assert line["agent/requests"] == 1 and line["agent/failed_fraction"] == 0


def test_a_framework_and_processes_that_are_killed(lab, tmp_path: Path) -> None:
    pipeline = lab.tiny_pipeline()
    nodes = pipeline["nodes"]
    command = {"command": [sys.executable, "program.py"], "concurrency": 4}
    nodes["rollout"] |= {"n": 4, "agent": command, "sampling": {"max_new_tokens": 3}}
    nodes["reward"] = {"op": "reward", "fn": "agent", "read_from": ["rollout"]}
    longer = {"max_new_tokens": 16}
    nodes["framework"] = {"op": "rollout", "engine": "generator", "n": 4, "agent": "framed:solve", "sampling": longer}
    nodes["framed"] = {"op": "reward", "fn": "agent", "read_from": ["framework"], "write": "framed_reward"}
    for name, node in nodes.items():
        if node["op"] in ("logprob", "advantage", "update"):
            nodes[name]["read_from"] = ["rollout"]
    pipeline["data"]["prompts_per_step"] = 2
    nodes["update"]["mini_batch"] = 2
    pipeline["run"] = {"steps": 2, "seed": 3}
    path = lab.write_pipeline(tmp_path, pipeline)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "framed.py").write_text(FRAMEWORK)
    run = lab.start(path, tmp_path / "run")
    assert run.wait() == 0, run.output
    for step, line in enumerate(run.metrics(), 1):
        assert line["framework/agent/requests"] == 2 and line["framework/agent/failed_fraction"] == 0
        assert line["agent/length"] > 0 and line["mismatch/logprob_diff/max"] < 1e-4
        table = pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pydict()
        assert table["sample_id"] == list(range(8)), "each row once"
        failed = {row for row, reason in enumerate(table["finish_reason"]) if reason == "error"}
        assert {row for row in range(8) if table["excluded"][row]} == failed
        assert set(range(1, 8, 4)) <= failed <= {row for row in range(8) if row % 4 in (1, 2)}
        assert line["agent/failed_fraction"] == len(failed) / 8
        assert all(table["output"][row].startswith("said ") for row in range(8) if row not in failed)
