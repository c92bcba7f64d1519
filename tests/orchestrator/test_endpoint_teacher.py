"""A real run whose teacher is a local server with OpenAI's protocol, until it returns wrong answers."""

from __future__ import annotations

import json

import pytest
from token_server import TokenServer

pytestmark = pytest.mark.slow

KEY = "sk-of-nobody-0123456789"
ROWS = 8 * 4


def test_a_run_ends_with_the_reason_and_goes_on_where_it_was(lab, tmp_path, chat_server, monkeypatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    teacher = TokenServer(chat_server)
    # Right in two steps, then a log-prob short.
    teacher.lie = lambda values: values if len(chat_server.requests) <= 2 * ROWS else values[:-1]
    pipeline = lab.tiny_pipeline()
    del pipeline["engines"]["reference"], pipeline["nodes"]["ref"], pipeline["data"]["val"]
    pipeline["nodes"] |= {
        "teacher": {
            "op": "logprob",
            "endpoint": chat_server.url,
            "model": "big",
            "api_key_env": "TEACHER_KEY",
            "write": "teacher_logprob",
        },
        "advantage": {"op": "advantage", "estimator": "none", "distillation": {}},
        "update": {"op": "update", "engine": "actor", "mini_batch": 4},
    }
    pipeline["run"] |= {"steps": 3, "save_every": 1, "validate_every": None}
    path = lab.write_pipeline(tmp_path, pipeline)
    run = lab.start(path, tmp_path / "run")
    assert run.wait() == 1
    assert "the teacher has not scored sample" in run.output
    assert "log-probs, but was asked for" in run.output
    assert [line["step"] for line in run.metrics()] == [1, 2]
    teacher.lie = lambda values: values
    again = lab.start(path, tmp_path / "run")
    assert again.wait() == 0, again.output
    assert [line["step"] for line in again.metrics()] == [1, 2, 3]
    assert {request.headers["Authorization"] for request in chat_server.requests} == {f"Bearer {KEY}"}
    texts = [file for file in run.folder.rglob("*") if file.suffix in (".yaml", ".json", ".jsonl", ".log", ".txt")]
    told = [run.output, again.output, *(file.read_text(errors="replace") for file in texts)]
    assert KEY not in json.dumps(told)
    assert again.left_behind() == []
