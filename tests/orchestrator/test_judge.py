"""Two judges in one run: a model behind a server on this machine, and the policy, on an engine that follows it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow

KEY = "sk-of-nobody-0123456789"
OWN = """
import dagrl

@dagrl.node(reads=["politeness", "digits"], writes=["reward"])
def both(batch):
    return {"reward": batch["politeness"] + batch["digits"]}

def length(reply, response):
    return len(reply) / 100
"""


def test_their_scores_are_what_the_policy_is_trained_on(lab, tmp_path, chat_server, monkeypatch) -> None:
    def say(body: dict) -> str:
        said = body["messages"][0]["content"].removeprefix("Rate ")
        return "GOOD" if said[:1] in tuple("02468") else "BAD"

    chat_server.reply = say
    monkeypatch.setenv("JUDGE_KEY", KEY)
    pipeline = lab.tiny_pipeline()
    pipeline["groups"]["judges"] = {"cpus_per_node": 1}
    pipeline["engines"]["critic"] = {"backend": "hf", "group": "judges", "weights_from": "actor"}
    pipeline["nodes"] |= {
        "manners": {
            "op": "judge",
            "endpoint": chat_server.url,
            "model": "judge-7b",
            "api_key_env": "JUDGE_KEY",
            "prompt": "Rate {response}",
            "parser": "GOOD|BAD",
            "scores": {"GOOD": 1, "BAD": 0},
            "write": "politeness",
        },
        "digits": {
            "op": "judge",
            "engine": "critic",
            "prompt": "{prompt}{response}",
            "parser": "own_judges:length",
            "sampling": {"max_new_tokens": 4},
            "max_prompt_tokens": 28,
            "write": "digits",
        },
        "reward": {"op": "own_judges:both"},
    }
    pipeline["run"] |= {"steps": 2, "save_every": None, "validate_every": 2}
    path = lab.write_pipeline(tmp_path, pipeline)
    (tmp_path / "own_judges.py").write_text(OWN)
    run = lab.start(path, tmp_path / "run")
    assert run.wait() == 0, run.output
    for line in run.metrics():
        assert line["judge/failed_fraction"] == 0
        assert 0 < line["reward/politeness"] < 1
        assert 0 < line["reward/digits"] <= 0.04
        assert line["reward/mean"] == pytest.approx(line["reward/politeness"] + line["reward/digits"])
        assert "time/manners_s" in line and "time/digits_s" in line
    assert "val/judge/failed_fraction" in run.metrics()[-1]
    events = json.loads((run.folder / "timeline.json").read_text())
    judged = [event["name"] for event in events if event["ph"] == "X" and event["args"].get("group") == "judges"]
    assert [name for name in judged if name == "sync"] == ["sync"] * 3, "weights of steps 0, 1 and 2 have come to it"
    table = pq.read_table(run.folder / "samples" / "step_1.parquet").to_pylist()
    for row in table:
        good = float(row["response"][:1] in tuple("02468"))
        assert row["reward"] == pytest.approx(good, abs=0.05)
    assert len(chat_server.requests) == 2 * 8 * 4 + 16
    assert {request.headers["Authorization"] for request in chat_server.requests} == {f"Bearer {KEY}"}
    told = [run.output, *(file.read_text(errors="replace") for file in run.folder.rglob("*") if _is_text(file))]
    assert KEY not in json.dumps(told)
    assert run.left_behind() == []


def _is_text(file: Path) -> bool:
    return file.suffix in (".yaml", ".json", ".jsonl", ".log", ".txt", ".out", ".err")
