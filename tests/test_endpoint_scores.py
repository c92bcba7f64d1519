"""Log-probs of given tokens over OpenAI's protocol, from servers on this machine, right ones and others."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from dagrl.endpoint import Endpoint, EndpointError, EndpointSetupError
from tests.helpers.hostile_http import Answer, cut, hostile, said, slow_body

KEY = "sk-very-secret-0123456789"
PROMPT, RESPONSE = np.array([5, 6, 7]), np.array([8, 9])
TOKENS = [5, 6, 7, 8, 9]
VALUES = [None, -0.5, -1.5, -2.5, -0.25]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own pauses before it tries again."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.02)


def score(url: str, top_k: int = 0, **options: Any) -> Any:
    told = {"api_key_env": None, "retries": 0, "timeout_s": 10.0} | options
    endpoint = Endpoint(url, "teacher-8b", **told)
    try:
        return endpoint.score(PROMPT, RESPONSE, top_k)
    finally:
        endpoint.close()


def answer(values: Any = VALUES, ids: Any = TOKENS, texts: Any = None) -> dict[str, Any]:
    """An answer of a server that echoes the prompt."""
    texts = [f"t{token}" for token in TOKENS] if texts is None else texts
    logprobs = {"token_logprobs": values, "tokens": texts, "top_logprobs": None, "text_offset": []}
    return {"choices": [{"index": 0, "text": "", "logprobs": logprobs, "prompt_token_ids": ids}]}


def test_the_tokens_are_sent_as_they_are(chat_server) -> None:
    chat_server.answers[:] = [(200, answer())]
    scored = score(chat_server.url)
    assert (scored.logprobs.tolist(), scored.logprobs.dtype, scored.texts) == ([-2.5, -0.25], np.float32, None)
    (request,) = chat_server.requests
    assert request.path == "/v1/completions"
    assert request.body == {
        "model": "teacher-8b",
        "prompt": TOKENS,
        "echo": True,
        "logprobs": 1,
        "max_tokens": 1,
        "temperature": 1.0,
        "return_token_ids": True,
    }


@pytest.mark.parametrize("values", [VALUES, [*VALUES, -3.0]], ids=["none", "one"])
def test_the_token_that_a_server_samples_is_left_out(chat_server, values) -> None:
    texts = [f"t{number}" for number in range(len(values))]
    chat_server.answers[:] = [(200, answer(values, ids=None, texts=texts))]
    scored = score(chat_server.url)
    assert scored.logprobs.tolist() == [-2.5, -0.25]
    assert scored.texts == ["t3", "t4"], "what the server calls them is compared with the tokenizer"


def place(**logprobs: Any) -> dict[str, dict[str, Any]]:
    return {token[1:]: {"logprob": value, "rank": 1, "decoded_token": "?"} for token, value in logprobs.items()}


LIKELIEST = [None, place(_6=-1), place(_7=-1), place(_8=-2.5, _3=-0.25, _4=-0.5), place(_4=-1.5, _9=-0.25)]


def test_the_likeliest_tokens_are_those_of_vllm(chat_server) -> None:
    """The place's own token is among them, or comes besides."""
    chat_server.answers[:] = [(200, {"choices": [answer()["choices"][0] | {"prompt_logprobs": LIKELIEST}]})]
    scored = score(chat_server.url, top_k=2)
    assert scored.logprobs.tolist() == [-2.5, -0.25]
    assert (scored.top_ids.tolist(), scored.top_ids.dtype) == ([[3, 4], [9, 4]], np.int32)
    assert (scored.top_logprobs.tolist(), scored.top_logprobs.dtype) == ([[-0.25, -0.5], [-0.25, -1.5]], np.float32)
    assert chat_server.requests[0].body["prompt_logprobs"] == 2


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, r"no likeliest tokens \(`prompt_logprobs`\); serve the teacher with vLLM"),
        (LIKELIEST[:4], "no likeliest tokens"),
        ([*LIKELIEST[:4], place(_4=-1.5)], "another number of likeliest tokens at each place"),
        ([*LIKELIEST[:4], place(_4=-1.5, _9=0.5)], "values that are no log-probs"),
        ([*LIKELIEST[:4], place(_4=float("nan"), _9=-1)], "values that are no log-probs"),
        ([*LIKELIEST[:4], place(_4=float("-inf"), _9=-1)], "values that are no log-probs"),
        ([*LIKELIEST[:4], place(_4=None, _9=-1)], "in a form that is not OpenAI's"),
        ([*LIKELIEST[:4], None], "in a form that is not OpenAI's"),
        ([*LIKELIEST[:4], {"a": {"logprob": -1}, "b": {"logprob": -2}}], "in a form that is not OpenAI's"),
    ],
)
def test_likeliest_tokens_that_are_none_are_reported(chat_server, given: Any, told: str) -> None:
    chat_server.answers[:] = [(200, {"choices": [answer()["choices"][0] | {"prompt_logprobs": given}]})]
    with pytest.raises(EndpointError, match=told):
        score(chat_server.url, top_k=2)


NAN, INFINITE = float("nan"), float("inf")
OTHER = [5, 6, 7, 8, 10]
LIES = {
    "too few": (answer(VALUES[:4]), "4 log-probs, but was asked for 5 tokens"),
    "too many": (answer([*VALUES, -1.0, -1.0]), "7 log-probs, but was asked for 5 tokens"),
    "of the sampled token alone": (answer([-1.0]), "1 log-probs, but was asked for 5 tokens"),
    "no log-probs": (answer(None), r"no log-probs of the prompt \(`echo`\); serve the teacher with SGLang or vLLM"),
    "an empty list": (answer([]), "no log-probs of the prompt"),
    "null": ({"choices": [{"index": 0, "text": "a", "logprobs": None}]}, "no log-probs of the prompt"),
    "as llama.cpp": (
        {"choices": [{"index": 0, "text": "a", "logprobs": {"content": [{"id": 8, "logprob": -1.0}]}}]},
        "no log-probs of the prompt",
    ),
    "other tokens": (answer(ids=OTHER), "log-probs of other tokens than it was asked for; is its tokenizer"),
    "fewer tokens": (answer(ids=TOKENS[1:]), "log-probs of other tokens"),
    "texts of another number": (answer(texts=["a"], ids=None), "log-probs of other tokens"),
    "nan": (answer([None, -1.0, -1.0, NAN, -1.0]), "nan as log-prob of token 8, at place 0"),
    "infinite": (answer([None, -1.0, -1.0, -1.0, -INFINITE]), "-inf as log-prob of token 9, at place 1"),
    "none": (answer([None, -1.0, -1.0, None, -1.0]), "None as log-prob of token 8"),
    "text": (answer([None, -1.0, -1.0, "-1", -1.0]), "-1 as log-prob of token 8"),
    "true": (answer([None, -1.0, -1.0, True, -1.0]), "True as log-prob of token 8"),
    "a probability": (answer([None, -1.0, -1.0, 0.5, -1.0]), "0.5 as log-prob of token 8"),
    "huge": (answer([None, -1.0, -1.0, -(10**400), -1.0]), "as log-prob of token 8"),
    "no choices": ({"choices": []}, "in a form that is not OpenAI's"),
    "two choices": ({"choices": answer()["choices"] * 2}, "in a form that is not OpenAI's"),
    "a choice of text": ({"choices": ["8"]}, "in a form that is not OpenAI's"),
    "an error": ({"error": {"message": "no"}}, "in a form that is not OpenAI's"),
    "a list": ([1, 2], "in a form that is not OpenAI's"),
}


@pytest.mark.parametrize(("reply", "told"), LIES.values(), ids=LIES)
def test_an_answer_that_is_not_the_log_probs_is_reported(chat_server, reply: Any, told: str) -> None:
    chat_server.answers[:] = [(200, reply)]
    with pytest.raises(EndpointError, match=told) as caught:
        score(chat_server.url)
    said_in_one_line = str(caught.value)
    assert said_in_one_line.startswith(chat_server.url)
    assert said_in_one_line.isprintable() and len(said_in_one_line) < 1000


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        pytest.param(cut, "cannot be reached: peer closed connection", id="closed in mid-answer"),
        pytest.param(slow_body, "has not answered in time; raise timeout_s, or lower concurrency", id="too late"),
        pytest.param(said(b"<html>", headers="Content-Type: text/html"), "in a form that is not OpenAI's", id="html"),
        pytest.param(said(b"{no"), "in another form than JSON", id="no JSON"),
    ],
)
def test_a_server_that_breaks_off_is_reported(reply: Answer, told: str) -> None:
    with hostile(reply) as (url, _), pytest.raises(EndpointError, match=told):
        score(url, timeout_s=1.0)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_model_is_not_asked_again(chat_server, monkeypatch, caplog, status: int) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    chat_server.answers[:] = [(status, {"error": {"message": f"no: {KEY}"}})] * 3
    with pytest.raises(EndpointSetupError, match=f"answers {status}") as caught:
        score(chat_server.url, retries=2, api_key_env="TEACHER_KEY")
    assert len(chat_server.requests) == 1
    assert KEY not in str(caught.value) + caplog.text + json.dumps([each.body for each in chat_server.requests])


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(chat_server, status: int) -> None:
    chat_server.answers[:] = [(status, {}), (status, {}), (200, answer())]
    assert score(chat_server.url, retries=2).logprobs.tolist() == [-2.5, -0.25]
    chat_server.answers[:] = [(status, {})] * 3
    with pytest.raises(EndpointError, match=f"answers {status}"):
        score(chat_server.url, retries=2)
