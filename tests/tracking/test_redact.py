"""What a tracker is told of a pipeline, and what not."""

from __future__ import annotations

import pytest

from dagrl.tracking.redact import HIDDEN, without_secrets


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apiKey",
        "OPENAI_API_KEY",
        "apikey",
        "secret_key",
        "access_token",
        "hf_token",
        "token",
        "password",
        "dbPassword",
        "client_secret",
        "aws_secret_access_key",
        "api_keys",
        "secrets",
    ],
)
def test_values_under_such_names_are_hidden(name: str) -> None:
    assert without_secrets({"nodes": {"judge": {"args": {name: "xyzzy"}}}}) == {
        "nodes": {"judge": {"args": {name: HIDDEN}}}
    }
    assert without_secrets({name: ["xyzzy"]}) == {name: [HIDDEN]}
    assert without_secrets({name: {"judge": ["xyzzy"]}}) == {name: {"judge": [HIDDEN]}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api_key_env", "JUDGE_KEY"),
        ("max_prompt_tokens", 1024),
        ("tokens_per_micro_batch", 16384),
        ("stop_token_ids", [3, 4]),
        ("eos_token", "</s>"),
        ("token", 7),
        ("tokenizer", "/models/Qwen3"),
        ("prompt_key", "question"),
        ("metric", "val/pass@4"),
        ("api_key", ""),
        ("data", {"val": None}),
        ("alphabet", "0123456789+="),
        ("endpoint", "http://judge:8000/v1"),
    ],
)
def test_all_else_stays(name: str, value: object) -> None:
    assert without_secrets({name: value}) == {name: value}


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("https://me:xyzzy@judge.example/v1", f"https://me:{HIDDEN}@judge.example/v1"),
        ("https://judge.example/v1?api_key=xyzzy&n=3", f"https://judge.example/v1?api_key={HIDDEN}&n=3"),
        ("Authorization: Bearer abcdef0123456789", f"Authorization: {HIDDEN}"),
        ("sk-proj-0123456789abcdefghij", HIDDEN),
        ("with hf_0123456789abcdefghij in it", f"with {HIDDEN} in it"),
        ("http://[half", "http://[half"),
    ],
)
def test_secrets_within_a_text_are_hidden(text: str, cleaned: str) -> None:
    assert without_secrets({"endpoint": text}) == {"endpoint": cleaned}


def test_the_pipeline_itself_is_not_touched() -> None:
    config = {"nodes": {"judge": {"api_key": "xyzzy"}}}
    without_secrets(config)
    assert config == {"nodes": {"judge": {"api_key": "xyzzy"}}}
