"""Evaluations of a model behind an OpenAI endpoint, in real processes."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

pytestmark = pytest.mark.slow

KEY = "sk-of-nobody-0123456789"


def test_an_endpoint_answers_the_messages_of_a_file_and_of_an_environment(
    lab, tmp_path, chat_server, monkeypatch
) -> None:
    lab.write_pipeline(tmp_path, lab.tiny_pipeline())
    lock, asked = threading.Lock(), []

    def reply(body: dict[str, Any]) -> str:
        """Right where the first number is 3, and every second time where it is 2."""
        left, right = map(int, body["messages"][-1]["content"].rstrip("=").split("+"))
        with lock:
            asked.append(left)
            is_right = left == 3 or (left == 2 and asked.count(2) % 2)
        return f"\\boxed{{{left + right if is_right else -1}}} ä"

    chat_server.reply = reply
    options = ["--endpoint", chat_server.url, "--model", "org/big", "--data", "train.parquet", "--n", 4, "-q"]
    ended = lab.call("eval", *options, "--api-key-env", "EVAL_KEY", at=tmp_path)
    assert ended.returncode == 2 and "EVAL_KEY is not set" in ended.stderr
    assert not chat_server.requests
    monkeypatch.setenv("EVAL_KEY", KEY)
    ended = lab.call("eval", *options, "--api-key-env", "EVAL_KEY", "--run-dir", "evals", at=tmp_path)
    assert ended.returncode == 0, ended.stderr
    [result] = json.loads((tmp_path / "evals" / "evaluation.json").read_text())["results"]
    [found] = result["sets"]
    # 4 prompts each have a first number of 0, 1, 2 and 3.
    assert found["figures"]["pass@1"]["value"] == pytest.approx((0 + 0 + 0.5 + 1) / 4)
    assert found["figures"]["pass@4"]["prompts"] == 16 and found["finish_reasons"] == {"stop": 64}
    requests = chat_server.requests
    assert len(requests) == 64 and {request.headers["Authorization"] for request in requests} == {f"Bearer {KEY}"}
    assert {json.dumps(request.body["messages"]) for request in requests} == {
        json.dumps([{"role": "user", "content": f"{left}+{right}="}]) for left in range(4) for right in range(4)
    }
    assert len({request.body["seed"] for request in requests}) == 64
    assert KEY not in "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())

    # One question more than the program asks itself is a conversation of three messages.
    (tmp_path / "sums.py").write_text(TASKS)
    ended = lab.call("eval", *options[:4], "--env", "sums:Sums", "-q", "--run-dir", "of_env", at=tmp_path)
    assert ended.returncode == 0, ended.stderr
    [result] = json.loads((tmp_path / "of_env" / "evaluation.json").read_text())["results"]
    [found] = result["sets"]
    assert (found["prompts"], found["lost"], found["finish_reasons"]["network"]) == (3, 1, 1)
    assert found["figures"]["pass@1"] == {
        "value": 0.5,
        "prompts": 2,
        **{name: found["figures"]["pass@1"][name] for name in ("low", "high")},
    }
    assert [len(request.body["messages"]) for request in chat_server.requests[64:]].count(3) == 2


TASKS = """
from dagrl.environments.failures import EnvironmentFailedError


class Sums:
    def rows(self):
        for left in (0, 3, 9):
            yield {"prompt": [{"role": "user", "content": f"{left}+1="}], "answer": str(left + 1)}

    async def solve(self, client, row):
        if row["answer"] == "10":
            raise EnvironmentFailedError("network", "the tasks' server is away")
        messages = list(row["messages"])
        for _ in range(2):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            said = reply.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, messages[0]]
        return float(f"boxed{{{row['answer']}}} ä" in said)
"""


def test_an_endpoint_that_refuses_ends_the_evaluation_without_a_score(lab, tmp_path, chat_server) -> None:
    lab.write_pipeline(tmp_path, lab.tiny_pipeline())
    chat_server.answers = [(401, {"error": {"message": "no such key"}})] * 64
    options = ["--endpoint", chat_server.url, "--model", "big", "--data", "train.parquet", "--run-dir", "evals"]
    ended = lab.call("eval", *options, at=tmp_path)
    assert ended.returncode == 1 and "answers 401: " in ended.stderr and "api_key_env" in ended.stderr
    assert not (tmp_path / "evals" / "evaluation.json").exists()
