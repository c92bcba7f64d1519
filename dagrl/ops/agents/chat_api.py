"""OpenAI's ``/v1/chat/completions`` and ``/v1/completions``: requests in, answers and streams of chunks out."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dagrl.ops.agents.messages import JsonObject, Message, RequestError, message_of
from dagrl.ops.agents.session import Reply, Wish

_MOST_REPLIES = 128


def chat_request(body: JsonObject, sent: dict[str, bytes]) -> tuple[list[Message], Wish]:
    """Messages and options of a request; its images are added to `sent`. Raises RequestError.

    Sampling options other than lengths and ends are ignored in favour of the node's: replies under others could not be
    trained on.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("`messages` is a list of at least one message")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return [message_of(message, sent) for message in messages], wish_of(body, limit, tools_of(body.get("tools"), body))


def wish_of(body: JsonObject, limit: object, tools: tuple[JsonObject, ...] = ()) -> Wish:
    """The options of a request. Raises RequestError."""
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise RequestError(f"the number of tokens must be at least 1, not {limit!r}")
    replies = body.get("n") or 1
    if not isinstance(replies, int) or not 1 <= replies <= _MOST_REPLIES:
        raise RequestError(f"`n` is a number from 1 to {_MOST_REPLIES}, not {replies!r}")
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestError("`stop` is a text, or a list of texts")
    if body.get("top_logprobs"):
        raise RequestError("`top_logprobs` is not supported: only the log-probs of sampled tokens are known")
    single = body.get("parallel_tool_calls") is False
    return Wish(replies, limit, tuple(stops), tools, single)


def tools_of(given: Any, body: JsonObject) -> tuple[JsonObject, ...]:
    """Tools as chat templates describe them. Raises RequestError."""
    choice = body.get("tool_choice")
    if choice == "none":
        return ()
    if choice not in (None, "auto"):
        raise RequestError("`tool_choice` can be auto or none: forced calls would come from another policy")
    tools = []
    if not isinstance(given or [], list):
        raise RequestError(f"`tools` is a list, not {given!r:.80}")
    for tool in given or ():
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise RequestError("tools are of type function")
        # The Responses API has the function's fields beside the type.
        function = tool.get("function") or {key: value for key, value in tool.items() if key != "type"}
        if not isinstance(function, Mapping):
            raise RequestError(f"the function of a tool is an object, not {function!r:.80}")
        kept = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
        if not isinstance(kept.get("name"), str):
            raise RequestError("a tool has a name")
        tools.append({"type": "function", "function": {"description": "", "parameters": {}, **kept}})
    return tuple(tools)


def chat_answer(body: JsonObject, replies: Sequence[Reply], tokens: Sequence[Sequence[str]]) -> JsonObject:
    choices = [
        {
            "index": index,
            "message": _message(reply),
            "finish_reason": "tool_calls" if reply.calls else reply.finish_reason,
            "logprobs": _logprobs(reply, texts) if body.get("logprobs") else None,
        }
        for index, (reply, texts) in enumerate(zip(replies, tokens, strict=True))
    ]
    return {**_head("chat.completion", "chatcmpl", body), "choices": choices, "usage": usage_of(replies)}


def chat_chunks(answer: JsonObject, *, with_usage: bool) -> Iterator[bytes]:
    head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in answer["choices"]:
        message = choice["message"]
        first: JsonObject = {"role": "assistant", "content": message["content"]}
        if "reasoning_content" in message:
            first["reasoning_content"] = message["reasoning_content"]
        if "tool_calls" in message:
            first["tool_calls"] = [{"index": number, **call} for number, call in enumerate(message["tool_calls"])]
        for delta, reason in ((first, None), ({}, choice["finish_reason"])):
            part = {"index": choice["index"], "delta": delta, "finish_reason": reason}
            part |= {"logprobs": choice["logprobs"] if reason is None else None}
            yield event({**head, "choices": [part]})
    if with_usage:
        yield event({**head, "choices": [], "usage": answer["usage"]})
    yield b"data: [DONE]\n\n"


def text_request(body: JsonObject) -> tuple[str | list[int], Wish]:
    """Prompt and options of a completion. Raises RequestError."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    tokens = isinstance(prompt, list) and all(isinstance(token, int) and 0 <= token < 2**31 for token in prompt)
    if not prompt or not (isinstance(prompt, str) or tokens):
        raise RequestError("`prompt` is a text or a list of tokens, one in each request")
    logprobs = body.get("logprobs") or 0
    if not isinstance(logprobs, int) or logprobs > 1:
        raise RequestError("`logprobs` can be 1: only log-probs of sampled tokens are known")
    return prompt, wish_of(body, body.get("max_tokens"))


def text_answer(body: JsonObject, replies: Sequence[Reply], tokens: Sequence[Sequence[str]]) -> JsonObject:
    choices = []
    for index, (reply, texts) in enumerate(zip(replies, tokens, strict=True)):
        logprobs = None
        if asks_for_logprobs(body):
            logprobs = {"tokens": [*texts], "token_logprobs": reply.logprobs.tolist(), "top_logprobs": None}
            logprobs["text_offset"] = [sum(map(len, texts[:place])) for place in range(len(texts))]
        choices.append({"index": index, "text": reply.text, "finish_reason": reply.finish_reason, "logprobs": logprobs})
    return {**_head("text_completion", "cmpl", body), "choices": choices, "usage": usage_of(replies)}


def text_chunks(answer: JsonObject, *, with_usage: bool) -> Iterator[bytes]:
    for choice in answer["choices"]:
        yield event({**answer, "choices": [choice], "usage": None})
    if with_usage:
        yield event({**answer, "choices": []})
    yield b"data: [DONE]\n\n"


def asks_for_logprobs(body: JsonObject) -> bool:
    """Whether a completion has log-probs: also with 0, which asks for sampled tokens alone."""
    return body.get("logprobs") is not None and body["logprobs"] is not False


def asks_for_usage(body: JsonObject) -> bool:
    """Whether a stream ends with the usage. Raises RequestError."""
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise RequestError(f"`stream_options` is an object, not {options!r:.80}")
    return bool(options.get("include_usage"))


def event(data: JsonObject, name: str | None = None) -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(data).encode() + b"\n\n"


def usage_of(replies: Sequence[Reply]) -> dict[str, int]:
    prompt, sampled = replies[0].prompt_tokens, sum(len(reply.tokens) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _head(kind: str, prefix: str, body: JsonObject) -> JsonObject:
    name = body.get("model") or "policy"
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": name}


def _message(reply: Reply) -> JsonObject:
    # Servers of OpenAI send null beside calls.
    message: JsonObject = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": key,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for key, call in zip(reply.call_ids, reply.calls, strict=True)
        ]
    return message


def _logprobs(reply: Reply, texts: Sequence[str]) -> JsonObject:
    content = [
        {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}
        for text, logprob in zip(texts, reply.logprobs.tolist(), strict=True)
    ]
    return {"content": content, "refusal": None}
