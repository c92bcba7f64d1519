"""The tokens of a trajectory as a tree: requests, sampled replies, and the sequences that are trained on.

An exchange is one request and the reply that the policy sampled. A request that extends the conversation of an earlier
exchange is its child, so that the tokens on the path from a root are exactly the tokens that the policy has read and
written. A rewritten conversation is a new root; two requests after the same reply are two branches. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dagrl.backends.base import Completion, GenerationRequest, not_sampled
from dagrl.config.schema import SamplingSpec

_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SeenImage:
    """An image, resized for the policy."""

    name: str
    """Its path, or the SHA-256 of its bytes, for samples."""
    pixels: np.ndarray
    """Uint8 [height, width, 3], resized."""


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image among tokens."""

    image: SeenImage
    begin: int
    """Index of its first token."""
    end: int

    def moved(self, by: int) -> PlacedImage:
        """The image after `by` tokens are inserted before it."""
        return replace(self, begin=self.begin + by, end=self.end + by)


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and its reply."""

    parent: Exchange | None
    given: np.ndarray
    """Tokens between the parent's reply and this one, int64; at a root, the whole prompt."""
    seed: int
    limit: int | None
    """Most tokens of the reply; None: as many as fit."""
    reply: Completion | None = None
    """None until the reply has been sampled and delivered to the program."""
    followers: int = 0
    images: tuple[PlacedImage, ...] = ()

    def path(self) -> list[Exchange]:
        exchanges = [self]
        while (parent := exchanges[-1].parent) is not None:
            exchanges.append(parent)
        return exchanges[::-1]


@dataclass(frozen=True, slots=True)
class Span:
    """A reply in a sequence."""

    begin: int
    """Index of its first token in the response."""
    end: int
    trained: bool
    """Whether its tokens are trained on here: a reply that several sequences contain counts in one of them."""


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """A path of the tree as one sample: a prompt and a response."""

    prompt: np.ndarray
    """Int64."""
    tokens: np.ndarray
    """Response, int64."""
    logprobs: np.ndarray
    """Float32; 0 for tokens that were not sampled."""
    spans: tuple[Span, ...]
    version: int
    """Oldest policy version that sampled any of the tokens."""
    finish_reason: str
    """The finish reason of its last reply."""
    routed_experts: np.ndarray | None
    versions: np.ndarray
    """Policy version that sampled each token of the response, int32; -1 for tokens that were not sampled."""
    prompt_images: tuple[PlacedImage, ...] = ()
    images: tuple[PlacedImage, ...] = ()

    @property
    def trained(self) -> int:
        """Tokens that are trained on."""
        return sum(span.end - span.begin for span in self.spans if span.trained)


class ContextLengthError(ValueError):
    """A request leaves no room for a reply."""


@dataclass(slots=True)
class TrajectoryTree:
    """The exchanges of one trajectory."""

    prompt: np.ndarray
    """The row's prompt: the first request with it has the random draws of a rollout without an agent."""
    seed: int
    longest_prompt: int
    """Most prompt tokens of a sequence; a longer context continues in the response."""
    longest_response: int
    sampling: SamplingSpec | None = None
    """The policy version of its requests; None for the call's version."""
    exchanges: list[Exchange] = field(default_factory=list)
    """The nodes with a reply, in the order of the replies."""
    _asked: dict[bytes, int] = field(default_factory=dict)
    """Context -> requests with it."""

    def begin(
        self,
        parent: Exchange | None,
        given: np.ndarray,
        limit: int | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> Exchange:
        """A new exchange after `parent`, with `images` among the given tokens.

        Raises ContextLengthError if no token of a reply fits.
        """
        exchange = Exchange(parent, given, self.seed, limit, images=tuple(images))
        context = self.context(exchange)
        first = self._prompt_length(exchange)
        if len(context) - first >= self.longest_response:
            raise ContextLengthError(
                f"the conversation has {len(context)} tokens, and no reply fits into {first + self.longest_response}, "
                "which max_prompt_tokens and sampling.max_new_tokens allow"
            )
        if not first:
            raise ContextLengthError(
                f"the conversation begins with an image of {exchange.path()[0].images[0].end} tokens, more than "
                f"{self.longest_prompt}, which max_prompt_tokens allows"
            )
        key = b" ".join([context.tobytes(), *(image.image.name.encode() for image in self._images(exchange))])
        times = self._asked[key] = self._asked.get(key, -1) + 1
        if parent is None:
            as_usual = np.array_equal(context, self.prompt)
        else:
            as_usual, exchange.seed = not parent.followers, parent.seed
            parent.followers += 1
        if times or not as_usual:
            # The seed depends on the context instead of the order of arrival, which differs between runs.
            exchange.seed = self._seed_of(key, times)
        return exchange

    def context(self, exchange: Exchange) -> np.ndarray:
        """Tokens before the reply, int64."""
        pieces = [piece for earlier in exchange.path() for piece in (earlier.given, _tokens(earlier))]
        return np.concatenate(pieces[:-1])

    def request(self, exchange: Exchange) -> GenerationRequest:
        context, images = self.context(exchange), self._images(exchange)
        length = self._prompt_length(exchange)
        prompt, begun = np.split(context, [length])
        starts = np.array([image.begin - length for image in images if image.begin >= length], dtype=np.int64)
        pixels = tuple(image.image.pixels for image in images)
        return GenerationRequest(prompt, exchange.seed, begun, exchange.limit, pixels, starts, sampling=self.sampling)

    def complete(self, exchange: Exchange, reply: Completion) -> None:
        exchange.reply = reply
        self.exchanges.append(exchange)

    def sequences(self, most: int) -> list[SampledSequence]:
        """At most `most` sequences: first the one with the last reply, then the ones that cover the most new tokens.

        A reply is trained on in the first sequence that contains it.
        """
        followed = {id(exchange.parent) for exchange in self.exchanges}
        leaves = [exchange for exchange in self.exchanges if id(exchange) not in followed][::-1]
        covered: set[int] = set()
        chosen: list[SampledSequence] = []

        def new_tokens(leaf: Exchange) -> int:
            return sum(len(_tokens(exchange)) for exchange in leaf.path() if id(exchange) not in covered)

        while leaves and len(chosen) < most:
            leaf = max(leaves, key=new_tokens) if chosen else leaves[0]
            leaves.remove(leaf)
            chosen.append(self._sequence(leaf, covered))
            covered |= {id(exchange) for exchange in leaf.path()}
        return chosen

    def sampled_tokens(self) -> int:
        return sum(len(_tokens(exchange)) for exchange in self.exchanges)

    def _sequence(self, leaf: Exchange, covered: set[int]) -> SampledSequence:
        pieces, logprobs, versions, spans, end = [], [], [], [], 0
        for exchange in leaf.path():
            reply = exchange.reply
            assert reply is not None, "a program only follows replies that it has"
            begin, end = end + len(exchange.given), end + len(exchange.given) + len(reply.tokens)
            pieces += [exchange.given, reply.tokens]
            logprobs += [np.zeros(len(exchange.given), dtype=np.float32), reply.logprobs]
            versions += [not_sampled(len(exchange.given)), reply.token_versions]
            spans.append(Span(begin, end, id(exchange) not in covered))
        length = self._prompt_length(leaf)
        prompt, tokens = np.split(np.concatenate(pieces), [length])
        assert leaf.reply is not None
        images = self._images(leaf)
        return SampledSequence(
            prompt,
            tokens,
            np.concatenate(logprobs)[length:].astype(np.float32),
            tuple(replace(span, begin=span.begin - length, end=span.end - length) for span in spans),
            min(exchange.reply.policy_version for exchange in leaf.path() if exchange.reply is not None),
            leaf.reply.finish_reason,
            leaf.reply.routed_experts,
            np.concatenate(versions)[length:],
            tuple(image for image in images if image.begin < length),
            tuple(image.moved(-length) for image in images if image.begin >= length),
        )

    def _images(self, exchange: Exchange) -> list[PlacedImage]:
        images, length = [], 0
        for earlier in exchange.path():
            images += [image.moved(length) for image in earlier.images]
            length += len(earlier.given) + len(_tokens(earlier))
        return images

    def _prompt_length(self, exchange: Exchange) -> int:
        root = exchange.path()[0]
        length = min(len(root.given), self.longest_prompt)
        # No image is cut.
        return min([length, *(image.begin for image in root.images if image.begin < length < image.end)])

    def _seed_of(self, context: bytes, times: int) -> int:
        digest = hashlib.blake2b(context, digest_size=16).digest()
        entropy = [self.seed % 2**64, *np.frombuffer(digest, dtype=np.uint32).tolist(), times]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])


def _tokens(exchange: Exchange) -> np.ndarray:
    return _NONE if exchange.reply is None else exchange.reply.tokens


def cut_reply(reply: Completion, length: int, context_length: int) -> Completion:
    """The first `length` tokens of a reply that a stop string ends."""
    routes = reply.routed_experts
    return replace(
        reply,
        tokens=reply.tokens[:length],
        logprobs=reply.logprobs[:length],
        versions=reply.token_versions[:length],
        finish_reason="stop",
        routed_experts=None if routes is None else routes[: context_length + length - 1],
    )


def digests(parts: Sequence[bytes], start: bytes = b"") -> list[bytes]:
    """A digest of each prefix of `parts`; equal prefixes have equal digests."""
    keys, last = [], start
    for part in parts:
        last = hashlib.blake2b(part, digest_size=16, key=last).digest()
        keys.append(last)
    return keys
