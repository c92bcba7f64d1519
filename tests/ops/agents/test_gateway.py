"""The endpoint as the official client sees it: three protocols, streams, tools, and keys that open one trajectory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI, AuthenticationError, BadRequestError
from scripted_policy import TOKENIZER, Policy, session_of

from dagrl.ops.agents.gateway import Gateway
from dagrl.ops.agents.session import Session

USER = {"role": "user", "content": "What is 3+4?"}
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "search", "arguments": {"query": "é"}}</tool_call>'


@pytest.fixture(scope="module")
def gateway() -> Gateway:
    return Gateway("127.0.0.1")


@pytest.fixture
def opened(gateway: Gateway) -> Iterator[Callable[..., Session]]:
    sessions = []

    def opened(policy: Policy, **options: Any) -> Session:
        session = session_of(policy, **options)
        gateway.add(session)
        sessions.append(session)
        return session

    yield opened
    for session in sessions:
        gateway.remove(session)


def asked(gateway: Gateway, key: str, ask: Callable[[AsyncOpenAI], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        async with AsyncOpenAI(base_url=gateway.url, api_key=key, max_retries=0) as client:
            return await ask(client)

    return asyncio.run(run())


def chat(gateway: Gateway, session: Session, **options: Any) -> Any:
    create = {"model": "any", "messages": [USER], **options}
    return asked(gateway, session.key, lambda client: client.chat.completions.create(**create))


def test_an_answer_has_what_clients_read(gateway, opened) -> None:
    policy = Policy(["7", "8"])
    session = opened(policy)
    answer = chat(gateway, session, logprobs=True, n=2)
    assert [choice.message.content for choice in answer.choices] == ["7", "8"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    first = answer.choices[0].logprobs.content
    assert [each.token for each in first] == ["7", "<|im_end|>"]
    np.testing.assert_allclose([each.logprob for each in first], policy.sampled[0].logprobs)
    assert answer.usage.completion_tokens == 4
    assert answer.usage.prompt_tokens == len(policy.asked[0].prompt)
    cut = chat(gateway, opened(Policy(["a long answer"])), max_tokens=3)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("a l", "length")


def test_a_call_comes_back_as_a_call(gateway, opened) -> None:
    answer = chat(gateway, opened(Policy([CALL])), tools=[SEARCH]).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("search", '{"query": "é"}')
    untold = chat(gateway, opened(Policy([CALL]))).choices[0]
    assert untold.message.content == CALL, "without tools there are no calls"


def test_streams_say_the_same(gateway, opened) -> None:
    async def collect(client: AsyncOpenAI) -> tuple[str, list[Any], Any]:
        stream = await client.chat.completions.create(
            model="x", messages=[USER], tools=[SEARCH], stream=True, stream_options={"include_usage": True}
        )
        text, calls, usage = "", [], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                calls += choice.delta.tool_calls or []
        return text, calls, usage

    text, calls, usage = asked(gateway, opened(Policy([f"Hm. {CALL}"])).key, collect)
    assert text == "Hm." and calls[0].function.arguments == '{"query": "é"}' and usage.completion_tokens > 5


def test_responses_remember_the_conversation(gateway, opened) -> None:
    policy = Policy(["One.", CALL, "Three."])
    session = opened(policy)
    tool = {"type": "function", "name": "search", "parameters": {}}

    async def talk(client: AsyncOpenAI) -> Any:
        first = await client.responses.create(model="x", input="Count.", instructions="Be brief.", tools=[tool])
        assert first.output_text == "One."
        options = {"model": "x", "instructions": "Be brief.", "tools": [tool]}
        second = await client.responses.create(previous_response_id=first.id, input="Go on.", **options)
        (call,) = [item for item in second.output if item.type == "function_call"]
        found = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        # Without the server's memory: everything is sent again.
        history = [
            {"role": "user", "content": "Count."},
            first.output[0].model_dump(),
            {"role": "user", "content": "Go on."},
        ]
        async with client.responses.stream(input=[*history, call.model_dump(), found], **options) as stream:
            events = [event.type async for event in stream]
            third = await stream.get_final_response()
        assert "response.output_text.delta" in events and third.output_text == "Three."

    asked(gateway, session.key, talk)
    (sequence,) = session.tree.sequences(9)
    assert len(sequence.spans) == 3
    whole = TOKENIZER.decode(np.concatenate([sequence.prompt, sequence.tokens]))
    assert "Be brief." in whole and whole.endswith("Three.<|im_end|>")


def test_texts_are_completed(gateway, opened) -> None:
    policy = Policy(["b", "c!d"])
    session = opened(policy)
    create = {"model": "x", "prompt": "a", "logprobs": 1}
    answer = asked(gateway, session.key, lambda client: client.completions.create(**create))
    assert answer.choices[0].text == "b" and answer.choices[0].logprobs.tokens == ["b", "<|im_end|>"]
    for asks, tokens in ((0, ["b", "<|im_end|>"]), (False, None)):
        policy.says.insert(0, "b")
        create = {"model": "x", "prompt": "z", "extra_body": {"logprobs": asks}}
        answer = asked(gateway, session.key, lambda client, create=create: client.completions.create(**create))
        logprobs = answer.choices[0].logprobs
        assert (logprobs and logprobs.tokens) == tokens
    create = {"model": "x", "prompt": "ab", "stop": "!"}
    answer = asked(gateway, session.key, lambda client: client.completions.create(**create))
    assert answer.choices[0].text == "c"


def test_a_key_opens_its_own_trajectory_while_it_lasts(gateway, opened) -> None:
    mine, other = opened(Policy()), opened(Policy())
    chat(gateway, mine)
    assert len(mine.tree.exchanges) == 1 and not other.tree.exchanges
    with pytest.raises(AuthenticationError, match="belongs to no trajectory"):
        asked(gateway, "dagrl-guess", lambda client: client.models.list())
    gateway.remove(mine)
    with pytest.raises(AuthenticationError):
        chat(gateway, mine)
    assert asked(gateway, other.key, lambda client: client.models.list()).data[0].id == "policy"


def test_a_key_does_not_continue_the_responses_of_another(gateway, opened) -> None:
    mine, other = opened(Policy()), opened(Policy())
    create = {"model": "x", "input": "What is 3+4?"}
    said = asked(gateway, mine.key, lambda client: client.responses.create(**create))
    with pytest.raises(BadRequestError):
        asked(gateway, other.key, lambda client: client.responses.create(previous_response_id=said.id, **create))
    assert not other.tree.exchanges
    asked(gateway, mine.key, lambda client: client.responses.create(previous_response_id=said.id, **create))
    assert len(mine.tree.exchanges) == 2


def test_the_endpoint_listens_on_one_address_alone(gateway) -> None:
    socket.create_connection(("127.0.0.1", gateway.port), 5).close()
    with pytest.raises(ConnectionRefusedError):
        # A socket on all addresses would accept this one too.
        socket.create_connection(("127.0.0.2", gateway.port), 5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "no role 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "images"),
        ({"tool_choice": "required", "tools": [SEARCH]}, "tool_choice"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"n": 1000}, "`n`"),
        ({"max_tokens": -1}, "at least 1"),
        ({"extra_body": {"stop": 5}}, "`stop`"),
        ({"extra_body": {"tools": 5}}, "`tools`"),
        ({"extra_body": {"tools": [{"type": "function", "function": "f"}]}}, "function of a tool"),
        ({"extra_body": {"stream_options": "x"}}, "`stream_options`"),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "`tool_calls`"),
    ],
)
def test_unsupported_requests_are_refused(gateway, opened, options, named) -> None:
    with pytest.raises(BadRequestError, match=named):
        chat(gateway, opened(Policy()), **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompt": [1, 2, 100_000]}, "no token 100000"),
        ({"prompt": [2**70]}, "`prompt`"),
        ({"prompt": "a", "extra_body": {"logprobs": "yes"}}, "`logprobs`"),
    ],
)
def test_completions_that_cannot_be_answered_are_refused(gateway, opened, options, named) -> None:
    session = opened(Policy())
    with pytest.raises(BadRequestError, match=named):
        asked(gateway, session.key, lambda client: client.completions.create(model="x", **options))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"extra_body": {"input": 5}}, "`input`"),
        ({"input": "a", "extra_body": {"previous_response_id": ["a"]}}, "no response"),
        ({"input": "a", "extra_body": {"n": 2}}, "one reply"),
    ],
)
def test_responses_that_cannot_be_answered_are_refused(gateway, opened, options, named) -> None:
    session = opened(Policy())
    with pytest.raises(BadRequestError, match=named):
        asked(gateway, session.key, lambda client: client.responses.create(model="x", **options))
    assert not session.tree.exchanges, "nothing was sampled"


@pytest.mark.parametrize(("body", "charset"), [("[" * 100_000, "utf-8"), ("{}", "foo"), ("{", "utf-8")])
def test_invalid_json_is_refused(gateway, opened, body, charset) -> None:
    headers = {
        "Authorization": f"Bearer {opened(Policy()).key}",
        "Content-Type": f"application/json; charset={charset}",
    }
    answer = httpx.post(f"{gateway.url}/chat/completions", content=body, headers=headers, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "the request is not JSON")


def test_limits_have_codes_that_clients_know(gateway, opened) -> None:
    with pytest.raises(BadRequestError) as refused:
        chat(gateway, opened(Policy(), longest=5))
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(BadRequestError) as refused:
        chat(gateway, opened(Policy(), max_turns=0))
    assert refused.value.code == "turn_limit_exceeded"


def test_a_reply_whose_client_is_gone_is_not_in_the_trajectory(gateway, opened) -> None:
    session = opened(Policy())
    begun = asyncio.run_coroutine_threadsafe(_event(), gateway.loop).result()

    async def slow(request: Any) -> Any:
        begun.set()
        await asyncio.sleep(3600)

    session.ask = slow

    async def leave(client: AsyncOpenAI) -> None:
        waiting = asyncio.ensure_future(client.chat.completions.create(model="x", messages=[USER]))
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(begun.wait(), gateway.loop))
        waiting.cancel()

    asked(gateway, session.key, leave)
    assert not session.tree.exchanges and not session.tree.sequences(3)


async def _event() -> asyncio.Event:
    return asyncio.Event()
