"""A client of OpenAI's protocol, against a real server on this machine."""

from __future__ import annotations

import gzip
import json
import logging
import socket
import ssl
import subprocess
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dagrl.config.schema import SamplingSpec
from dagrl.endpoint import Endpoint, EndpointError, EndpointReply, EndpointSetupError
from tests.helpers.hostile_http import Answer, cut, endless, hostile, said, slow_body, slow_headers

KEY = "sk-very-secret-0123456789"
SAMPLING = SamplingSpec(temperature=0.0, max_new_tokens=64)
QUESTION = [{"role": "user", "content": "How good is it?"}]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own pauses before it tries again."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.02)


def ask(
    url: str, sampling: SamplingSpec = SAMPLING, extra_body: dict[str, Any] | None = None, **options: Any
) -> EndpointReply:
    told = {"api_key_env": None, "retries": 0, "timeout_s": 10.0} | options
    endpoint = Endpoint(url, "judge-7b", **told)
    try:
        return endpoint.ask(QUESTION, sampling, extra_body or {})
    finally:
        endpoint.close()


def test_a_question_is_asked_in_openais_words(chat_server) -> None:
    assert ask(chat_server.url) == EndpointReply("7", 2)
    (request,) = chat_server.requests
    assert request.path == "/v1/chat/completions"
    assert request.body == {"model": "judge-7b", "messages": QUESTION, "max_tokens": 64, "temperature": 0.0}


def test_extra_parameters_are_sent_and_null_removes_one(chat_server) -> None:
    sampling = SamplingSpec(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, max_new_tokens=8, stop_token_ids=(3,), ignore_eos=True
    )
    extra = {"max_tokens": None, "max_completion_tokens": 9, "chat_template_kwargs": {"enable_thinking": False}}
    ask(chat_server.url, sampling, extra)
    (request,) = chat_server.requests
    assert request.body == {
        "model": "judge-7b",
        "messages": QUESTION,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "max_completion_tokens": 9,
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_the_key_comes_from_the_environment_and_goes_into_one_header(chat_server, monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    ask(chat_server.url, api_key_env="JUDGE_KEY")
    (request,) = chat_server.requests
    assert request.headers["Authorization"] == f"Bearer {KEY}"
    assert KEY not in json.dumps(request.body) + request.path


def test_nothing_else_of_the_environment_is_printed(chat_server, monkeypatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "somebody-elses")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://somewhere.else/v1")
    ask(chat_server.url)
    (request,) = chat_server.requests
    assert "somebody-elses" not in str(request.headers)
    assert "Authorization" not in request.headers


def test_a_missing_key_is_reported_with_its_variable(chat_server, monkeypatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ValueError, match=r"JUDGE_KEY, which holds the endpoint's key, is not set in the workers on"):
        ask(chat_server.url, api_key_env="JUDGE_KEY")


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_transient_errors_are_retried(chat_server, status: int) -> None:
    chat_server.answers[:] = [(status, {"error": {"message": "busy"}}), (status, {})]
    assert ask(chat_server.url, retries=2).text == "7"
    assert len(chat_server.requests) == 3


def test_patience_ends(chat_server) -> None:
    chat_server.answers[:] = [(503, {"error": {"message": "overloaded\n  today"}})] * 9
    with pytest.raises(EndpointError, match=f"{chat_server.url} answers 503: .*overloaded") as told:
        ask(chat_server.url, retries=2)
    assert not isinstance(told.value, EndpointSetupError)
    assert len(chat_server.requests) == 3


def test_an_answer_that_takes_too_long_is_given_up(chat_server) -> None:
    chat_server.delay_s = 1.0
    with pytest.raises(EndpointError, match="has not answered in time; raise timeout_s, or lower concurrency"):
        ask(chat_server.url, timeout_s=0.1)


def test_an_unreachable_address_is_reported() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}/v1"
        with pytest.raises(EndpointError, match=f"{url} cannot be reached: .*; is its server running"):
            ask(url, retries=1)


@pytest.mark.parametrize(
    ("status", "hint"),
    [(401, "look at the key in JUDGE_KEY"), (403, "the key in JUDGE_KEY"), (404, "the model's name, judge-7b")],
)
def test_permanent_errors_are_not_retried(chat_server, monkeypatch, status: int, hint: str) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    chat_server.answers[:] = [(status, {"error": {"message": f"Incorrect API key provided: {KEY}."}})]
    with pytest.raises(EndpointSetupError, match=hint) as told:
        ask(chat_server.url, retries=3, api_key_env="JUDGE_KEY")
    assert KEY not in str(told.value)
    assert len(chat_server.requests) == 1


def test_the_key_is_in_no_log_and_no_representation(chat_server, monkeypatch, caplog) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    chat_server.answers[:] = [(500, {})]
    with caplog.at_level(logging.DEBUG):
        ask(chat_server.url, retries=1, api_key_env="JUDGE_KEY")
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    "reply",
    [{}, {"choices": []}, {"choices": [{"message": {"content": None}}]}, "plain text", b"{not json", b"\xff\xfe"],
)
def test_an_answer_of_another_form_is_reported(chat_server, reply: Any) -> None:
    chat_server.answers[:] = [(200, reply)]
    with pytest.raises(EndpointError, match=f"^{chat_server.url} has answered") as told:
        ask(chat_server.url)
    assert "\n" not in str(told.value)


def test_many_questions_at_once_share_a_client(chat_server) -> None:
    chat_server.reply = lambda body: body["messages"][0]["content"].upper()
    endpoint = Endpoint(chat_server.url, "judge-7b", api_key_env=None, retries=0, timeout_s=30.0)
    questions = [[{"role": "user", "content": f"question {number}"}] for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda question: endpoint.ask(question, SAMPLING, {}).text, questions))
    endpoint.close()
    assert answers == [f"QUESTION {number}" for number in range(24)]


def completion(content: str = '"7"', tokens: str = "2") -> bytes:
    return (
        f'{{"choices": [{{"message": {{"content": {content}}}}}], "usage": {{"completion_tokens": {tokens}}}}}'.encode()
    )


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        pytest.param(endless, "answers with more than 16 MiB", id="endless"),
        pytest.param(slow_body, "has not answered in time; raise timeout_s", id="slow body"),
        pytest.param(slow_headers, "has not answered in time; raise timeout_s", id="slow headers"),
        pytest.param(cut, "cannot be reached: peer closed connection", id="cut"),
        pytest.param(
            said(gzip.compress(b" " * (64 << 20)), headers="Content-Type: application/json\r\nContent-Encoding: gzip"),
            "answers in the encoding 'gzip', which was not asked for",
            id="gzip",
        ),
        pytest.param(said(b"[" * 100_000), "has answered in another form than JSON", id="deep"),
        pytest.param(said(completion(tokens="9" * 5000)), "has answered in another form than JSON", id="digits"),
        pytest.param(
            said(b'{"error": {"message": "busy"}}'), "has answered in a form that is not OpenAI's", id="error"
        ),
        pytest.param(said(b"<html>", headers="Content-Type: text/html"), "in a form that is not OpenAI's", id="html"),
        pytest.param(
            said(b"", "302 Found", "Location: http://[::1"), "answers with a redirect to no address", id="no address"
        ),
        pytest.param(
            said(zlib.compress(b" " * 1000), headers="Content-Type: text/plain; charset=zlib"),
            "in a form that is not OpenAI's",
            id="zlib as charset",
        ),
        pytest.param(said(b"7", headers="Content-Type: text/plain; charset=rot13"), "in a form that", id="rot13"),
        pytest.param(
            said(b"", "302 Found", f"Location: http://{'a' * 5000}"), "redirect to http://a+, another", id="long host"
        ),
        pytest.param(said(b"", "200 OK", "Content-Type: application/json"), "in another form than JSON", id="nothing"),
        pytest.param(lambda send: send(b"\0" * 1000), "cannot be reached", id="no HTTP"),
    ],
)
def test_a_service_that_answers_with_anything_is_named_in_time(monkeypatch, answer: Answer, told: str) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with hostile(answer) as (url, _), pytest.raises(EndpointError, match=told) as caught:
        ask(url, timeout_s=2.0, api_key_env="JUDGE_KEY")
    assert str(caught.value).startswith(url) and str(caught.value).isprintable() and len(str(caught.value)) < 1000


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"])
def test_no_key_and_no_question_follows_a_redirect_to_another_service(monkeypatch, status: str) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with hostile(said(completion())) as (other, asked):
        redirect = said(b"", status, f"Location: {other}/v1/chat/completions?key={KEY}")
        with hostile(redirect) as (url, _), pytest.raises(EndpointError, match="another service") as caught:
            ask(url, api_key_env="JUDGE_KEY")
    assert not asked and KEY not in str(caught.value)


def test_a_redirect_within_a_service_is_followed() -> None:
    def answer(send) -> None:
        redirect = said(b"", "307 Temporary Redirect", "Location: /v2/chat/completions")
        (said(completion()) if b"POST /v2/" in asked[-1] else redirect)(send)

    with hostile(answer) as (url, asked):
        assert ask(f"{url}/v1").text == "7"


def test_an_untrusted_certificate_is_reported(tmp_path) -> None:
    files = ("-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=a", *files], check=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with hostile(said(completion()), context) as (url, asked):
        with pytest.raises(EndpointError, match="CERTIFICATE_VERIFY_FAILED"):
            ask(url)
        assert not asked


@pytest.mark.parametrize("tokens", ["-1", "1e308", "true", "9" * 400, "NaN", "Infinity", '"many"', "[]"])
def test_a_number_of_tokens_that_is_none_is_not_counted(tokens: str) -> None:
    with hostile(said(completion(tokens=tokens))) as (url, _):
        assert ask(url).tokens in (None, 1 if tokens == "true" else None)


def test_halves_of_characters_are_replaced() -> None:
    with hostile(said(completion('"7 \\ud800"'))) as (url, _):
        assert ask(url).text == "7 ?"


def test_any_number_of_questions_is_asked_at_a_time() -> None:
    count = 120
    all_asked = threading.Barrier(count)

    def answer(send) -> None:
        all_asked.wait(20)
        said(completion())(send)

    with hostile(answer) as (url, _), ThreadPoolExecutor(count) as pool:
        endpoint = Endpoint(url, "judge-7b", api_key_env=None, retries=0, timeout_s=30.0)
        asked = [pool.submit(endpoint.ask, QUESTION, SAMPLING, {}) for _ in range(count)]
        assert {each.result().text for each in asked} == {"7"}
        endpoint.close()
