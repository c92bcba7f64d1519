"""The OpenAI-compatible endpoint: one server for all trajectories of a worker, which are distinguished by their
keys.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from dagrl.ops.agents.chat_api import (
    asks_for_logprobs,
    asks_for_usage,
    chat_answer,
    chat_chunks,
    chat_request,
    text_answer,
    text_chunks,
    text_request,
)
from dagrl.ops.agents.messages import JsonObject, RequestError, reply_message
from dagrl.ops.agents.responses_api import responses_answer, responses_events, responses_request
from dagrl.ops.agents.session import Reply, Session, TurnLimitError
from dagrl.ops.agents.tree import ContextLengthError

if TYPE_CHECKING:
    from aiohttp import web

_BODY_BYTES = 256 << 20
_BACKLOG = 4096
_CODES = {
    RequestError: "invalid_request",
    ContextLengthError: "context_length_exceeded",
    TurnLimitError: "turn_limit_exceeded",
}


class Gateway:
    """The endpoint and its thread. Sessions are added and removed on its event loop."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of `host`."""
        self.loop = asyncio.new_event_loop()
        self._sessions: dict[str, Session] = {}
        threading.Thread(target=self.loop.run_forever, name="gateway", daemon=True).start()
        self.port = asyncio.run_coroutine_threadsafe(self._serve(host), self.loop).result()
        self.url = f"http://{host}:{self.port}/v1"

    def add(self, session: Session) -> None:
        self._sessions[session.key] = session

    def remove(self, session: Session) -> None:
        """Close it: the key is no longer valid."""
        self._sessions.pop(session.key, None)

    async def _serve(self, host: str) -> int:
        from aiohttp import web

        app = web.Application(client_max_size=_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._answering(self._chat))
        app.router.add_post("/v1/completions", self._answering(self._text))
        app.router.add_post("/v1/responses", self._answering(self._responses))
        app.router.add_get("/v1/models", self._models)
        # With cancellation, a reply whose client has disconnected is not part of the trajectory.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, host, 0, backlog=_BACKLOG)
        await site.start()
        return runner.addresses[0][1]

    def _answering(
        self, answer: Callable[[Session, JsonObject], Awaitable[tuple[JsonObject, Iterable[bytes]]]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        from aiohttp import web

        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._session_of(request)
            if session is None:
                return _refusal(401, "this key belongs to no trajectory, or to one that has ended", "invalid_api_key")
            try:
                body = await request.json()
            except (ValueError, LookupError, RecursionError):
                # An unknown charset is a LookupError.
                return _refusal(400, "the request is not JSON", "invalid_request")
            if not isinstance(body, dict):
                return _refusal(400, "the request is a JSON object", "invalid_request")
            try:
                whole, events = await answer(session, body)
            except (RequestError, ContextLengthError, TurnLimitError) as error:
                return _refusal(400, str(error), _CODES[type(error)])
            if not body.get("stream"):
                return web.json_response(whole)
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await stream.prepare(request)
            for event in events:
                await stream.write(event)
            await stream.write_eof()
            return stream

        return handle

    def _session_of(self, request: web.Request) -> Session | None:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        return self._sessions.get(key.strip()) if kind.lower() == "bearer" else None

    async def _models(self, request: web.Request) -> web.Response:
        from aiohttp import web

        if self._session_of(request) is None:
            return _refusal(401, "this key belongs to no trajectory, or to one that has ended", "invalid_api_key")
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "dagrl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, session: Session, body: JsonObject) -> tuple[JsonObject, Iterable[bytes]]:
        sent: dict[str, bytes] = {}
        with_usage = asks_for_usage(body)
        messages, wish = chat_request(body, sent)
        await session.see(sent)
        replies = await session.chat(messages, wish)
        answer = chat_answer(body, replies, [_texts(session, reply, body) for reply in replies])
        return answer, chat_chunks(answer, with_usage=with_usage)

    async def _text(self, session: Session, body: JsonObject) -> tuple[JsonObject, Iterable[bytes]]:
        with_usage = asks_for_usage(body)
        prompt, wish = text_request(body)
        replies = await session.continue_text(prompt, wish)
        answer = text_answer(body, replies, [_texts(session, reply, body) for reply in replies])
        return answer, text_chunks(answer, with_usage=with_usage)

    async def _responses(self, session: Session, body: JsonObject) -> tuple[JsonObject, Iterable[bytes]]:
        sent: dict[str, bytes] = {}
        messages, wish = responses_request(body, session.conversations, sent)
        await session.see(sent)
        (reply,) = await session.chat(messages, wish)
        answer = responses_answer(body, reply)
        said = reply_message(reply.content, reply.calls, reply.call_ids)
        session.conversations[answer["id"]] = [*messages, said]
        return answer, responses_events(answer)


def _texts(session: Session, reply: Reply, body: JsonObject) -> list[str]:
    """The text of each token, if the request asks for log-probs."""
    if not asks_for_logprobs(body):
        return []
    return [session.writer.tokenizer.decode([token]) for token in reply.tokens.tolist()]


def _refusal(status: int, message: str, code: str) -> web.Response:
    from aiohttp import web

    kind = "authentication_error" if status == 401 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return web.json_response(body, status=status)
