"""Real runs whose server is killed in the middle of conversations: each turn is sampled, and answered, once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
VLLM = Path(__file__).parents[2] / ".venv-vllm"

STEPS, SAMPLES, TURNS = 3, 32, 3
TALK = '''
import json
import threading
from pathlib import Path

import dagrl
import psutil

HERE = Path(__file__).parent
AFTER = 80
"""Turns of the first step and some of the second one."""
_lock = threading.Lock()


def note(*what):
    """Log a turn; kill the server in the second step, when some responses have turns and others do not."""
    with _lock:
        with (HERE / "turns.jsonl").open("a") as log:
            log.write(json.dumps(what) + "\\n")
        if len((HERE / "turns.jsonl").read_text().splitlines()) >= AFTER and not (HERE / "killed").exists():
            (HERE / "killed").touch()
            (HERE / "killed").write_text("".join(kill()))


def kill():
    mine = [each.pid for each in psutil.Process().parents()] + [psutil.Process().pid]
    for each in psutil.process_iter(["cmdline", "ppid"]):
        title = "".join(each.info["cmdline"] or ())
        if ("sglang::scheduler" in title or "EngineCore" in title) and each.info["ppid"] in mine:
            each.kill()
            yield f"{each.info['ppid']}"


def calls(text):
    return [("echo", {"text": text})]


@dagrl.tool
def echo(text: str, *, extra_info: dict) -> str:
    """Says something."""
    note(extra_info["index"], text)
    return "+1="


async def solve(client, row):
    messages = list(row["messages"])
    for turn in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
        text = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "+1="}]
        if turn < 2:
            note(row["extra_info"]["index"], text)
    return float(text[:1] in "02468")
'''
TOOLS = {"tools": ["talk:echo"], "tool_format": "talk:calls"}
AGENT = {"agent": "talk:solve"}
SGLANG = {"backend": "sglang"}
KINDS = [
    pytest.param((TOOLS, SGLANG), id="tools"),
    pytest.param((AGENT, SGLANG), id="agent"),
    pytest.param(
        (TOOLS, {"backend": "vllm", "environment": str(VLLM)}),
        id="vllm",
        marks=pytest.mark.skipif(not VLLM.exists(), reason="`make vllm` builds the environment of vLLM"),
    ),
]


@pytest.fixture(scope="module", params=KINDS)
def run(request, lab, tmp_path_factory):
    kind, server = request.param
    folder = tmp_path_factory.mktemp("lost")
    pipeline = lab.tiny_pipeline()
    del pipeline["data"]["val"], pipeline["nodes"]["ref"], pipeline["engines"]["reference"]
    del pipeline["nodes"]["update"]["loss"]
    pipeline["engines"]["generator"] = {**server, "group": "rollout", "weights_from": "actor"}
    pipeline["model"]["init"] |= {"max_position_embeddings": 64, "head_dim": 32}
    rollout = pipeline["nodes"]["rollout"]
    rollout |= {"max_turns": TURNS, "sampling": {"max_new_tokens": 40}, **kind}
    if kind is TOOLS:
        # Short turns that are not cut, which would end the response.
        rollout["sampling"]["stop"] = ["1", "3", "5", "7", "9"]
    if server is SGLANG:
        # Conversations of the other server are interrupted, and continue too.
        pipeline["groups"]["rollout"]["cpus_per_node"] = 2
    pipeline["nodes"]["reward"]["fn"] = "agent" if kind is AGENT else "rewards:even"
    pipeline["run"] = {"steps": STEPS, "seed": 3, "save_every": STEPS, "max_restarts": 1}
    path = lab.write_pipeline(folder, pipeline)
    (folder / "talk.py").write_text(TALK)
    run = lab.start(path, folder / "run")
    assert run.wait() == 0, run.output
    return run


def samples(run, step: int) -> list[dict[str, Any]]:
    return pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pylist()


def test_each_turn_is_sampled_and_answered_once(run) -> None:
    folder: Path = run.folder.parent
    logged = Counter(tuple(json.loads(line)) for line in (folder / "turns.jsonl").read_text().splitlines())
    recorded: Counter[tuple[int, str]] = Counter()
    for step in range(1, STEPS + 1):
        rows = samples(run, step)
        assert len({row["sample_id"] for row in rows}) == len(rows) == SAMPLES
        for row in rows:
            left, right = row["prompt"].rstrip("=").split("+")
            said = [turn["text"] for turn in row["turns"] if turn["turn"]]
            answered = len(said) - 1
            recorded.update((int(left) * 4 + int(right), text) for text in said[:answered])
    assert logged == recorded


def test_only_the_server_is_started_again(run) -> None:
    killed = (run.folder.parent / "killed").read_text()
    workers = json.loads((run.folder / "workers.json").read_text())
    (worker,) = (name for name, info in workers.items() if killed == str(info["pid"]))
    assert f"server {worker} has died" in run.output
    assert f"{worker} restarted" in run.output
    metrics = run.metrics()
    assert [line["run/restarts"] for line in metrics] == [0, 1, 1]
    for step, line in enumerate(metrics, 1):
        assert {row["policy_version"] for row in samples(run, step)} == {step - 1}
        assert line["samples/trained"] == line["samples/generated"] == SAMPLES
        assert line["samples/failed"] == 0
        assert line["mismatch/logprob_diff/max"] <= 1e-5
