"""What is hidden of a pipeline and of texts, and what not."""

from __future__ import annotations

import re

import pytest

from dagrl.redact import HIDDEN, hide_in_arguments, hide_secrets, hiding, without_secrets


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
        "PGPASSWORD",
        "MYSQL_PWD",
        "GITHUB_PAT",
        "auth",
        "Authorization",
        "Set-Cookie",
        "cookies",
        "access_tokens",
        "AccountKey",
        "wandb_key",
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
        ("sqlite:////runs/mlflow.db", "sqlite:////runs/mlflow.db"),
        ("github_pat_11ABCDEFG0123456789_abc", HIDDEN),
        ("glpat-abcdefghij0123456789", HIDDEN),
        ("xoxb-123456789012-abcdefghij", HIDDEN),
        ("AIzaSyA0123456789abcdefghijklmnopqrstuv", HIDDEN),
        ("ASIAABCDEFGHIJKLMNOP", HIDDEN),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-def", HIDDEN),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", HIDDEN),
        ("auth: Basic dXNlcjpwYXNz", f"auth: {HIDDEN}"),
        ("Authorization: Basic dXNlcjpwYXNz", f"Authorization: {HIDDEN}"),
        ("Cookie: a=b; session=c", f"Cookie: {HIDDEN}"),
        ("PGPASSWORD=xyzzy psql", f"PGPASSWORD={HIDDEN} psql"),
        ("agent --verbose --api-key xyzzy -n 3", f"agent --verbose --api-key {HIDDEN} -n 3"),
        ("agent --api-key=xyzzy", f"agent --api-key={HIDDEN}"),
        ("-H 'X-Api-Key: xyzzy'", f"-H 'X-Api-Key: {HIDDEN}'"),
        ('{"password": "two words", "n": 3}', f'{{"password": "{HIDDEN}", "n": 3}}'),
        ("override nodes.rollout.agent.env.NAME=xyzzy", f"override nodes.rollout.agent.env.NAME={HIDDEN}"),
        ("A=HF_TOKEN=xyzzy", f"A=HF_TOKEN={HIDDEN}"),
        ("AccountName=a;AccountKey=xyzzy==;End=x", f"AccountName=a;AccountKey={HIDDEN};End=x"),
        ("Basic understanding of sums", "Basic understanding of sums"),
        ("unknown token: '<tool_call>'", "unknown token: '<tool_call>'"),
        ("max_tokens=5, eos_token=</s>", "max_tokens=5, eos_token=</s>"),
        ("global-step-checkpoint-directory", "global-step-checkpoint-directory"),
    ],
)
def test_secrets_within_a_text_are_hidden(text: str, cleaned: str) -> None:
    assert without_secrets({"endpoint": text}) == {"endpoint": cleaned}


def test_the_pipeline_itself_is_not_touched() -> None:
    config = {"nodes": {"judge": {"api_key": "xyzzy"}}}
    without_secrets(config)
    assert config == {"nodes": {"judge": {"api_key": "xyzzy"}}}


def test_all_values_of_a_program_s_environment_are_hidden() -> None:
    config = {"agent": {"env": {"A": "plain", "LIST": ["x"]}}, "args": {"env": "CartPole"}, "command": ["env", "A"]}
    hidden = {"A": HIDDEN, "LIST": [HIDDEN]}
    assert without_secrets(config) == {**config, "agent": {"env": hidden}}


def test_the_value_of_a_secret_option_is_hidden() -> None:
    command = ["python", "a.py", "--api-key", "xyzzy", "--verbose", "--token=xyzzy", "-n", "3"]
    hidden = ["python", "a.py", "--api-key", HIDDEN, "--verbose", f"--token={HIDDEN}", "-n", "3"]
    assert without_secrets({"command": command}) == {"command": hidden}
    assert hide_in_arguments(["dagrl", "run", "nodes.rollout.agent.env.A=xyzzy"])[2].endswith(f"A={HIDDEN}")


def test_secrets_of_a_pipeline_are_hidden_wherever_they_stand() -> None:
    hide = hiding({"env": {"A": "plain words", "SHORT": "abc"}, "name": "run"})
    assert hide("it said: plain words, abc, run") == f"it said: {HIDDEN}, abc, run"


@pytest.mark.parametrize(
    "text", ["a=", "a-", "--a ", "cookie: ", "https://", "password='", "eyJaaaaaaaa.", "-----BEGIN PRIVATE KEY-----"]
)
def test_the_work_grows_with_the_text_and_not_faster(text: str) -> None:
    assert len(hide_secrets(text * 20_000)) > 0


@pytest.mark.parametrize(
    "config",
    [
        {"command": ["curl", "-u", "me:xyzzy-words"]},
        {"command": ["curl", "--user", "me:xyzzy-words", "http://a"]},
        {"args": {"headers": [["Authorization", "xyzzy-words"]]}},
        {"args": {"headers": [("X-Api-Key", "xyzzy-words")]}},
        {"args": {"headers": [{"name": "Authorization", "value": "xyzzy-words"}]}},
        {"args": {"password": 246810}, "env": {"PIN": 246810}},
        {"url": "https://maps.example/v1?key=xyzzy-words&q=a"},
        {"agent": {"env": {"API_KEY": "xyzzy-words"}, "command": ["run", "with", "xyzzy-words"]}},
        {"args": {"api_key": "xyzzy-words"}, "nodes": {"judge": {"system": "say xyzzy-words"}}},
    ],
)
def test_secrets_in_other_forms_and_places_are_hidden(config: dict[str, object]) -> None:
    assert not re.search("xyzzy|246810", str(without_secrets(config)))


def test_words_of_an_environment_stay_elsewhere() -> None:
    config = {"env": {"STAGE": "reward"}, "nodes": {"reward": {"op": "reward"}}, "u": ["-u", "words"]}
    assert without_secrets(config) == {**config, "env": {"STAGE": HIDDEN}}
