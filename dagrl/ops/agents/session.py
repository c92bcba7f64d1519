"""One trajectory at the endpoint: its tree, and the way from a request to replies of the policy."""

from __future__ import annotations

import asyncio
import secrets
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from dagrl.backends.base import Completion, GenerationRequest
from dagrl.backends.tool_calls import Call, Parser, after_reasoning, begins_reasoning
from dagrl.config.errors import counted
from dagrl.model_files.tokenizer import begun_text
from dagrl.ops.agents.context_writer import ContextWriter
from dagrl.ops.agents.messages import ImageReader, JsonObject, Message, key_of, reply_message, with_names
from dagrl.ops.agents.tree import (
    ContextLengthError,
    Exchange,
    PlacedImage,
    SeenImage,
    TrajectoryTree,
    cut_reply,
    digests,
)
from dagrl.ops.turns.template import encodable

_LENGTH, _TURNS = "length", "turns"
_LONG_TEXT = 20_000
"""Characters that a tokenizer encodes in a few milliseconds."""
_LONG_TEXTS = ThreadPoolExecutor(1, thread_name_prefix="long texts")


type Ask = Callable[[GenerationRequest], Awaitable[Completion]]
type _Given = tuple[Exchange | None, np.ndarray, list[PlacedImage]]
"""The exchange that a request follows, the tokens after it, and the images in them."""


class TurnLimitError(ValueError):
    """A trajectory has used all of its turns."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Options of a request."""

    replies: int = 1
    limit: int | None = None
    stops: tuple[str, ...] = ()
    tools: tuple[dict[str, object], ...] = ()
    single_call: bool = False
    """Only the first tool call of a reply counts."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply in the form that a program gets."""

    text: str
    """The whole text, without the token that ended it."""
    reasoning: str
    content: str
    """The text without reasoning and calls."""
    calls: tuple[Call, ...]
    call_ids: tuple[str, ...]
    finish_reason: str
    tokens: np.ndarray
    """Int64."""
    logprobs: np.ndarray
    """Float32 [tokens]."""
    prompt_tokens: int


@dataclass(slots=True, eq=False)
class Session:
    """One trajectory. All methods run on the endpoint's event loop."""

    tree: TrajectoryTree
    writer: ContextWriter
    parser: Callable[[Sequence[JsonObject]], Parser]
    """Returns the parser of calls for the tools of a request."""
    hermes: bool
    """Whether calls are written between marks, so that the text before them is known."""
    ask: Ask
    max_turns: int
    reader: ImageReader = field(default_factory=lambda: ImageReader(None))
    images: dict[str, SeenImage] = field(default_factory=dict)
    """Images of its messages by the SHA-256 of their bytes; at first those of the row."""
    key: str = field(default_factory=lambda: f"dagrl-{secrets.token_urlsafe(24)}")
    refused: str | None = None
    """``length`` or ``turns`` once a request was refused for that limit."""
    conversations: dict[str, list[Message]] = field(default_factory=dict)
    """Ids of responses -> their conversations, for ``previous_response_id``."""
    _turns: int = 0
    _ends: dict[bytes, list[Exchange]] = field(default_factory=dict)
    """Digest of a conversation up to a reply -> the exchanges with that reply."""
    _texts: list[tuple[str, Exchange]] = field(default_factory=list)
    """For completions: prompts with their replies, as text."""

    async def see(self, sent: Mapping[str, bytes]) -> None:
        """Store images by their SHA-256, for messages of `chat` that name them. Raises RequestError."""
        for key, data in sent.items():
            if key not in self.images:
                self.images[key] = await self.reader.read(key, data)

    async def chat(self, messages: Sequence[Message], wish: Wish) -> list[Reply]:
        """Replies to a conversation. Raises RequestError, ContextLengthError or TurnLimitError."""
        messages = with_names(messages)
        start = digests([repr(wish.tools).encode()])[0]
        said = digests([key_of(message) for message in messages], start)
        characters = sum(map(_characters, messages))
        self._check_length(characters)
        parent, given, images = await self._written(characters, partial(self._given, messages, said, wish))
        read = self.parser(wish.tools) if wish.tools else None

        async def reply() -> Reply:
            exchange, completion, text = await self._sample(parent, given, wish, images)
            made = self._reply(exchange, completion, text, read, wish)
            message = reply_message(made.content, made.calls, made.call_ids)
            end = digests([key_of(message)], said[-1] if said else start)[0]
            self._ends.setdefault(end, []).append(exchange)
            return made

        return await _all(reply() for _ in range(wish.replies))

    async def continue_text(self, prompt: str | Sequence[int], wish: Wish) -> list[Reply]:
        """Continuations of a text or of tokens. Errors as in `chat`."""
        if isinstance(prompt, str):
            self._check_length(len(prompt))
            parent, given = await self._written(len(prompt), partial(self._known_text, prompt))
        else:
            parent, given = self._known_tokens(prompt)
        self.writer.check_text(given)

        async def reply() -> Reply:
            exchange, completion, text = await self._sample(parent, given, wish)
            if isinstance(prompt, str):
                # Programs continue after the text alone, or write the stop string themselves.
                self._texts += [(prompt + reply, exchange) for reply in {text, self._decode(completion.tokens)}]
            return self._reply(exchange, completion, text, None, wish)

        return await _all(reply() for _ in range(wish.replies))

    # -- what is known already

    def _check_length(self, characters: int) -> None:
        """Raise ContextLengthError if a text is too long for any tokenisation."""
        tokens = self.tree.longest_prompt + self.tree.longest_response
        if characters > tokens * self.writer.longest_token:
            self.refused = _LENGTH
            raise ContextLengthError(f"the conversation has {characters} characters, too many for {tokens} tokens")

    async def _written[Found](self, characters: int, write: Callable[[ContextWriter], Found]) -> Found:
        """The result of `write`. For a long text it runs in a thread, one at a time, so that the loop serves the other
        agents.
        """
        if characters < _LONG_TEXT:
            return write(self.writer)
        return await asyncio.get_running_loop().run_in_executor(_LONG_TEXTS, write, self.writer.of_another_thread)

    def _given(self, messages: Sequence[Message], said: Sequence[bytes], wish: Wish, writer: ContextWriter) -> _Given:
        """The reply that the conversation continues, and the messages after it; all messages for a new conversation"""
        for count in range(len(messages) - 1, 0, -1):
            if ends := self._ends.get(said[count - 1]):
                # Several replies may have the same text: prefer one that no request has continued.
                parent = next((exchange for exchange in ends if not exchange.followers), ends[-1])
                assert parent.reply is not None
                images = self._images_of(messages[count:])
                pixels = [image.pixels for image in images]
                given = writer.following(messages[count:], wish.tools, int(parent.reply.tokens[-1]), pixels)
                if given is not None:
                    return parent, given, self._placed(given, images)
                break
        images = self._images_of(messages)
        given = writer.conversation(messages, wish.tools, [image.pixels for image in images])
        return None, given, self._placed(given, images)

    def _images_of(self, messages: Sequence[Message]) -> list[SeenImage]:
        return [self.images[key] for message in messages for key in message.get("images", ())]

    def _placed(self, given: np.ndarray, images: Sequence[SeenImage]) -> list[PlacedImage]:
        starts = self.writer.image_starts(given, [image.pixels for image in images])
        return [
            PlacedImage(image, start, start + self.writer.image_tokens(image.pixels))
            for image, start in zip(images, starts, strict=True)
        ]

    def _known_text(self, prompt: str, writer: ContextWriter) -> tuple[Exchange | None, np.ndarray]:
        for text, exchange in sorted(self._texts, key=lambda item: -len(item[0])):
            if prompt.startswith(text) and len(prompt) > len(text):
                return exchange, writer.plain(prompt[len(text) :])
        return None, np.array(begun_text(writer.tokenizer, encodable(prompt)), dtype=np.int64)

    def _known_tokens(self, prompt: Sequence[int]) -> tuple[Exchange | None, np.ndarray]:
        tokens = np.array(prompt, dtype=np.int64)
        longest: tuple[Exchange | None, int] = None, 0
        for exchange in self.tree.exchanges:
            assert exchange.reply is not None
            seen = np.concatenate([self.tree.context(exchange), exchange.reply.tokens])
            if longest[1] < len(seen) < len(tokens) and np.array_equal(seen, tokens[: len(seen)]):
                longest = exchange, len(seen)
        return longest[0], tokens[longest[1] :]

    # -- one reply

    async def _sample(
        self, parent: Exchange | None, given: np.ndarray, wish: Wish, images: Sequence[PlacedImage] = ()
    ) -> tuple[Exchange, Completion, str]:
        if self._turns >= self.max_turns:
            self.refused = _TURNS
            raise TurnLimitError(f"the policy has had its {counted(self.max_turns, 'turn')}, the node's max_turns")
        try:
            exchange = self.tree.begin(parent, given, wish.limit, images)
        except ContextLengthError:
            self.refused = _LENGTH
            raise
        self._turns += 1
        completion = await self.ask(self.tree.request(exchange))
        completion, text = self._until_stop(exchange, completion, wish.stops)
        self.tree.complete(exchange, completion)
        return exchange, completion, text

    def _until_stop(self, exchange: Exchange, completion: Completion, stops: Sequence[str]) -> tuple[Completion, str]:
        """The reply up to the first stop string, and its text without it."""
        tokens = completion.tokens
        ended = completion.finish_reason == "stop"
        text = self._decode(tokens[:-1] if ended else tokens)
        places = [place for stop in stops if (place := text.find(stop)) >= 0]
        if not places:
            return completion, text

        def stopped(length: int) -> bool:
            begun = self._decode(tokens[:length])
            return any(stop in begun for stop in stops)

        length = bisect_left(range(len(tokens) + 1), True, key=stopped)
        return cut_reply(completion, length, len(self.tree.context(exchange))), text[: min(places)]

    def _reply(self, exchange: Exchange, completion: Completion, text: str, read: Parser | None, wish: Wish) -> Reply:
        # Some parsers read a truncated call as a complete one.
        context = self.tree.context(exchange)
        thinks = begins_reasoning(self.writer.tokenizer, context)
        parsed = read(text, thinks=thinks) if read and completion.finish_reason != _LENGTH else ()
        calls = [call for call in parsed if isinstance(call, Call)]
        if wish.single_call:
            calls = calls[:1]
        content = after_reasoning(text)
        reasoning = text[: len(text) - len(content)]
        if calls:
            content = content.partition("<tool_call>")[0] if self.hermes else ""
        return Reply(
            text,
            reasoning.removeprefix("<think>").removesuffix("</think>").strip(),
            content.strip() if reasoning or calls else content,
            tuple(calls),
            # Nine letters and digits, as Mistral's templates require.
            tuple(call.id or secrets.token_hex(5)[:9] for call in calls),
            completion.finish_reason,
            completion.tokens,
            completion.logprobs,
            len(context),
        )

    def _decode(self, tokens: np.ndarray) -> str:
        return self.writer.tokenizer.decode(tokens)


def _characters(message: Message) -> int:
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content or ())


async def _all(replies: Iterable[Coroutine[object, object, Reply]]) -> list[Reply]:
    """All results, in order; the first failure cancels the others."""
    waiting = [*replies]
    if len(waiting) == 1:
        return [await waiting[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in waiting]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
