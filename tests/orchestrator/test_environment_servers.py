"""Episodes of real servers of OpenEnv and NeMo Gym: one by one with a scripted policy, and in a run."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scripted_policy import TOKENIZER, Policy, session_of

from dagrl.environments import foreign
from dagrl.environments.nemo_gym import NemoGym
from dagrl.ops.agents.function_processes import FunctionProcesses
from dagrl.ops.agents.gateway import Gateway
from dagrl.plugins.agent import NamedAgent

pytestmark = pytest.mark.slow
PYTHON = Path(__file__).parents[2] / ".agents" / "gym" / "bin" / "python"
SERVERS = Path(__file__).parents[1] / "helpers" / "environment_servers.py"
STEPS, PROMPTS, N = 4, 8, 4
LETTERS = """
import json

from openenv.core.env_server import Action, Environment, Observation, State, create_app

from dagrl.environments.openenv import OpenEnv

class Letter(Observation):
    text: str
    hint: str = ""

class Letters(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def list_splits(self):
        return ["test"]

    def num_tasks(self, split):
        return 3

    def reset(self, seed=None, episode_id=None, split="", index=0):
        return Letter(text=f"letter {index} of {split}")

    def step(self, action, timeout_s=None):
        return Letter(text="", done=True)

    @property
    def state(self):
        return State()

app = create_app(Letters, Action, Letter, env_name="letters", max_concurrent_envs=2)

def main():
    print(json.dumps([*OpenEnv(app="letters:app", split="test", instructions="Spell.").rows()]))
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers") / "log"


@pytest.fixture(scope="module")
def servers(log: Path) -> Iterator[dict[str, str]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([PYTHON, SERVERS, log], text=True, **pipes) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        # The package prints lines of its own.
        yield json.loads(next(line for line in lines if line.startswith("{")))
        process.kill()


def episode(name: str, args: dict[str, Any], row: dict[str, Any], says: list[str]) -> tuple[float | None, str]:
    """The reward, and all that the policy has seen at last."""
    gateway, policy = Gateway("127.0.0.1"), Policy(says)
    session = session_of(policy)
    gateway.add(session)
    environment = FunctionProcesses(NamedAgent(None, name, args, None), PYTHON if name == "openenv" else None)
    try:
        result = asyncio.run(asyncio.wait_for(environment.run(gateway.url, session.key, row), 60))
    finally:
        environment.close()
    # Each reply is in the row once, and nothing else is trained on.
    (sequence,) = session.tree.sequences(1)
    assert sequence.trained == sum(len(reply.tokens) for reply in policy.sampled)
    last = policy.asked[-1]
    return result.reward, TOKENIZER.decode([*last.prompt, *last.begun])


def call(tool: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def test_tools_of_openenv_are_those_of_the_policy(servers) -> None:
    row = {"messages": [{"role": "user", "content": "Roll."}], "seed": 1}
    says = [call("rol", sides=6), call("roll", sides=6)]
    reward, seen = episode("openenv", {"url": servers["dice"]}, row, says)
    assert reward == 2.25
    assert "# Tools roll" in seen and "Unknown tool: 'rol'" in seen


def test_nemo_gyms_tools_keep_their_session(servers) -> None:
    tools = [
        {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": True}
        for name in ("increment_counter", "get_counter_value")
    ]
    parameters = {
        "input": [{"role": "developer", "content": "Count."}, {"role": "user", "content": "2"}],
        "tools": tools,
    }
    task = {"responses_create_params": parameters, "initial_count": 3, "expected_count": 5}
    row = {"extra_info": {"nemo_gym": json.dumps(task)}}
    says = [call("increment_counter", count=2), call("verify", reward=1), call("get_counter_value"), "5"]
    reward, seen = episode("nemo_gym", {"url": servers["counter"]}, row, says)
    assert reward == 1.0
    assert '{"count":5}' in seen and "there is no tool 'verify'" in seen


def test_a_gymnasium_of_nemo_gym_gives_observations(servers) -> None:
    task = {"responses_create_params": {"input": "Deal me in."}, "agent_ref": {"name": "dealer"}}
    args = {"url": {"dealer": servers["blackjack"]}}
    reward, seen = episode("nemo_gym", args, {"extra_info": {"nemo_gym": json.dumps(task)}}, ["<action>stand</action>"])
    assert reward in (-1.0, 0.0, 1.0)
    assert "Deal me in." in seen and "Dealer shows" in seen


def test_an_application_of_openenv_is_served_for_the_tasks_of_a_split(tmp_path: Path) -> None:
    (tmp_path / "letters.py").write_text(LETTERS)
    command = foreign.command(PYTHON, "letters")
    variables = foreign.variables(PYTHON) | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, _, third = json.loads(done.stdout)
    system = {"role": "system", "content": "Spell."}
    assert first["prompt"] == [system, {"role": "user", "content": "letter 0 of test"}]
    assert third["extra_info"] == {"reset": {"split": "test", "index": 2}}


def test_a_line_without_a_task_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"responses_create_params": {"input": "1+1="}}\n{"input": "1+1="}\n')
    with pytest.raises(ValueError, match=r"tasks\.jsonl:2: no task with responses_create_params\.input"):
        list(NemoGym(data=str(file)).rows())


def test_a_run_has_each_episode_once_with_exact_tokens(lab, servers, log: Path, tmp_path: Path) -> None:
    pipeline = lab.tiny_pipeline()
    nodes = pipeline["nodes"]
    gym = {"environment": "nemo_gym", "args": {"url": servers["gym_sums"]}}
    openenv = {"environment": "openenv", "args": {"url": servers["sums"], "episodes": 16}, "python": str(PYTHON)}
    nodes["rollout"] |= {"n": N, "agent": openenv, "sampling": {"max_new_tokens": 16}}
    nodes["reward"] = {"op": "reward", "fn": "agent", "read_from": ["rollout"]}
    nodes["gym"] = {"op": "rollout", "engine": "generator", "n": N, "agent": gym, "sampling": {"max_new_tokens": 3}}
    nodes["verified"] = {"op": "reward", "fn": "agent", "read_from": ["gym"], "write": "gym_reward"}
    for node in nodes.values():
        if node["op"] in ("logprob", "advantage", "update"):
            node["read_from"] = ["rollout"]
    pipeline["run"] = {"steps": STEPS, "seed": 3}
    path = lab.write_pipeline(tmp_path, pipeline)
    tasks = [
        {"responses_create_params": {"input": f"{left}+{right}="}, "total": left + right}
        for left in range(4)
        for right in range(4)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    extras = []
    for environment, args in ((openenv, {}), (gym, {"data": str(tmp_path / "tasks.jsonl")})):
        named = [environment["environment"], "--args", json.dumps(environment["args"] | args)]
        if "python" in environment:
            named += ["--python", environment["python"]]
        done = lab.call("data", "environment", *named, "--out", tmp_path / "rows.parquet")
        assert done.returncode == 0, done.stderr
        rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
        extras.append([row["extra_info"] for row in rows])
    # Both environments have the same prompts, in the same order.
    rows = [row | {"extra_info": first | second} for row, first, second in zip(rows, *extras, strict=True)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")

    run = lab.start(path, tmp_path / "run")
    assert run.wait() == 0, run.output
    for step, line in enumerate(run.metrics(), 1):
        assert line["agent/failed_fraction"] == 0 and line["gym/agent/failed_fraction"] == 0
        # A reply may take all tokens of its conversation.
        assert 1 < line["agent/requests"] <= 2 and line["gym/agent/requests"] == 1
        assert line["gym/agent/length"] > 0
        assert line["mismatch/logprob_diff/max"] < 1e-4
        samples = pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pydict()
        assert samples["sample_id"] == list(range(PROMPTS * N))
    episodes = STEPS * PROMPTS * N
    assert Counter(log.read_text().split()) == {"openenv": len(rows) + episodes, "nemo_gym": episodes}
