"""OpenAI's ``/v1/responses``: items in and out, read as a chat."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dagrl.ops.agents.chat_api import event, tools_of, usage_of, wish_of
from dagrl.ops.agents.messages import JsonObject, Message, RequestError, message_of
from dagrl.ops.agents.session import Reply, Wish


def responses_request(
    body: JsonObject, conversations: Mapping[str, list[Message]], sent: dict[str, bytes]
) -> tuple[list[Message], Wish]:
    """Messages and options of a request; `conversations` are keyed by the ids of their last responses.

    Its images are added to `sent`. Raises RequestError.
    """
    messages: list[Message] = []
    if instructions := body.get("instructions"):
        messages.append(message_of({"role": "system", "content": instructions}, sent))
    if earlier := body.get("previous_response_id"):
        if not isinstance(earlier, str) or earlier not in conversations:
            raise RequestError(f"there is no response {earlier!r} of this trajectory")
        # Instructions of earlier requests do not carry over.
        begins = 1 if conversations[earlier][0]["role"] == "system" and instructions else 0
        messages += conversations[earlier][begins:]
    given = body.get("input") or []
    if not isinstance(given, str | list):
        raise RequestError(f"`input` is a text, or a list of items, not {given!r:.80}")
    messages += _messages([{"role": "user", "content": given}] if isinstance(given, str) else given, sent)
    if not messages:
        raise RequestError("`input` is a text, or a list of items")
    wish = wish_of(body, body.get("max_output_tokens"), tools_of(body.get("tools"), body))
    if wish.replies > 1:
        raise RequestError("/v1/responses has one reply; use /v1/chat/completions for several")
    return messages, wish


def responses_answer(body: JsonObject, reply: Reply) -> JsonObject:
    output: list[JsonObject] = []
    if reply.reasoning:
        thought = {"type": "summary_text", "text": reply.reasoning}
        output.append({"id": _id("rs"), "type": "reasoning", "summary": [thought]})
    if reply.content or not reply.calls:
        text = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        item = {"id": _id("msg"), "type": "message", "role": "assistant", "status": "completed", "content": [text]}
        output.append(item)
    for key, call in zip(reply.call_ids, reply.calls, strict=True):
        item = {"id": _id("fc"), "type": "function_call", "status": "completed", "call_id": key, "name": call.name}
        output.append({**item, "arguments": json.dumps(call.arguments, ensure_ascii=False)})
    usage = usage_of([reply])
    cut = reply.finish_reason == "length"
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "model": body.get("model") or "policy",
        "output": output,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "temperature": None,
        "top_p": None,
        "metadata": {},
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def responses_events(answer: JsonObject) -> Iterator[bytes]:
    number = 0

    def made(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number - 1, **fields}, kind)

    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield made("response.created", response=begun)
    yield made("response.in_progress", response=begun)
    for index, item in enumerate(answer["output"]):
        place = {"output_index": index}
        started = {**item, **({"content": []} if item["type"] == "message" else {})}
        started |= {"arguments": ""} if item["type"] == "function_call" else {}
        yield made("response.output_item.added", item={**started, "status": "in_progress"}, **place)
        place["item_id"] = item["id"]
        if item["type"] == "message":
            (part,) = item["content"]
            place["content_index"] = 0
            yield made("response.content_part.added", part={**part, "text": ""}, **place)
            yield made("response.output_text.delta", delta=part["text"], logprobs=[], **place)
            yield made("response.output_text.done", text=part["text"], logprobs=[], **place)
            yield made("response.content_part.done", part=part, **place)
        elif item["type"] == "function_call":
            yield made("response.function_call_arguments.delta", delta=item["arguments"], **place)
            yield made("response.function_call_arguments.done", arguments=item["arguments"], **place)
        yield made("response.output_item.done", item=item, output_index=index)
    yield made("response.incomplete" if answer["status"] == "incomplete" else "response.completed", response=answer)


def _messages(items: Sequence[Any], sent: dict[str, bytes]) -> list[Message]:
    """Items as messages: a text and the calls after it are one message of the assistant."""
    messages: list[JsonObject] = []
    for item in items:
        if not isinstance(item, Mapping):
            raise RequestError(f"an item of `input` is an object, not {item!r:.80}")
        match item.get("type", "message"):
            case "message":
                messages.append({"role": item.get("role"), "content": item.get("content")})
            case "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": "", "tool_calls": []})
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = item.get("output")
                content = output if isinstance(output, str | list) else json.dumps(output)
                messages.append({"role": "tool", "content": content, "tool_call_id": item.get("call_id")})
            case "reasoning":
                # The policy sampled this item, so its tokens are known.
                continue
            case kind:
                raise RequestError(f"items of type {kind!r} are not supported")
    return [message_of(message, sent) for message in messages]


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
