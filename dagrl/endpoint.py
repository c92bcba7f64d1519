"""A client for a model behind an OpenAI-compatible endpoint, with retries and timeouts."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from dagrl.config.errors import in_one_line
from dagrl.config.schema import SamplingSpec
from dagrl.config.schema.nodes.base import EndpointNode

if TYPE_CHECKING:
    from openai import APIError

_SETTING_UP = (401, 403, 404)
"""Status codes that retries cannot change: key, address or model name are wrong."""
_SHOWN_CHARACTERS = 300
_MOST_TOKENS = 1 << 31
_LEAST_LOGPROB, _MOST_LOGPROB = -1e30, 1e-3
"""Rounding apart, a log-prob is at most 0; float32 holds the least."""


class EndpointError(OSError):
    """The endpoint did not answer a question, after all retries."""


class EndpointSetupError(EndpointError):
    """The endpoint will not answer any question."""


@dataclass(frozen=True, slots=True)
class EndpointReply:
    """A model's reply."""

    text: str
    tokens: int | None
    """Number of tokens, if the endpoint reports it."""
    cut: bool = False
    """Whether it reached the most tokens."""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Log-probs of given tokens."""

    logprobs: np.ndarray
    """Float32 [tokens]."""
    texts: list[str] | None
    """The tokens as the server writes them, [tokens]; None if it has returned their ids, which are those asked for."""
    top_ids: np.ndarray
    """The likeliest tokens at each place, the likeliest first, int32 [tokens, k]; k may be 0."""
    top_logprobs: np.ndarray
    """Float32 [tokens, k]."""

    @classmethod
    def none(cls, top_k: int) -> ScoredTokens:
        """Log-probs of a response without tokens."""
        nothing = np.zeros((0, top_k), dtype=np.float32)
        return cls(np.zeros(0, dtype=np.float32), None, nothing.astype(np.int32), nothing)


class Endpoint:
    """A client for one endpoint and model; thread-safe."""

    def __init__(self, url: str, model: str, *, api_key_env: str | None, retries: int, timeout_s: float) -> None:
        """`url` is the part before ``/chat/completions``. Raises ValueError if the environment has no such key.

        The key is read here, and used only in the requests' header.
        """
        from openai import AsyncOpenAI, Omit

        from dagrl.bounded_http import BoundedClient

        self._url, self._model = url, model
        self._key = _key_of(api_key_env)
        self._key_env = api_key_env
        # Do not send other settings from the user's environment.
        unsaid: dict[str, Any] = dict.fromkeys(("OpenAI-Organization", "OpenAI-Project"), Omit())
        if self._key is None:
            unsaid["Authorization"] = Omit()
        # Bounds the time of a whole answer, which the library's own client does not.
        self._client = AsyncOpenAI(
            base_url=url,
            api_key=self._key or "none",
            max_retries=retries,
            timeout=timeout_s,
            default_headers=unsaid,
            http_client=BoundedClient(timeout_s, follow_redirects=True),
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"endpoint {model}", daemon=True).start()

    def ask(
        self, messages: Sequence[Mapping[str, str]], sampling: SamplingSpec, extra_body: Mapping[str, Any]
    ) -> EndpointReply:
        """The model's reply to a conversation. Raises EndpointError.

        Retries connection errors, timeouts, rate limits and server errors.
        """
        reply = self._answer("/chat/completions", self._body(messages, sampling, extra_body))
        with self._reading(reply):
            text = reply["choices"][0]["message"]["content"]
            cut = reply["choices"][0].get("finish_reason") == "length"
        if not isinstance(text, str):
            raise EndpointError(f"{self._url} has answered without a text: {self._told(reply)}")
        usage = reply.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        counted = isinstance(tokens, int) and 0 <= tokens <= _MOST_TOKENS
        # JSON can hold lone surrogates, which UTF-8 cannot encode.
        return EndpointReply(text.encode(errors="replace").decode(), tokens if counted else None, cut)

    def score(self, prompt: np.ndarray, response: np.ndarray, top_k: int = 0) -> ScoredTokens:
        """Log-probs of the tokens of `response` after `prompt`, int64 [tokens] both, at temperature 1.

        The prompt of the request is both of them, and it is echoed with its log-probs; the one token that is sampled
        after it is left out. The `top_k` likeliest tokens at each place, or all that the model has, are vLLM's
        ``prompt_logprobs``. Raises EndpointError as `ask` does, and for answers without a number for each token.
        """
        tokens, begin = [*prompt.tolist(), *response.tolist()], len(prompt)
        body = {
            "model": self._model,
            "prompt": tokens,
            "echo": True,
            # SGLang takes 0 for none.
            "logprobs": 1,
            # SGLang refuses 0.
            "max_tokens": 1,
            "temperature": 1.0,
            # vLLM's and SGLang's: other servers leave them out of account.
            "return_token_ids": True,
            **({"prompt_logprobs": top_k} if top_k else {}),
        }
        reply = self._answer("/completions", body)
        with self._reading(reply):
            (choice,) = reply["choices"]
            logprobs, ids = choice.get("logprobs"), choice.get("prompt_token_ids")
            numbers = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
            texts = logprobs.get("tokens") if isinstance(logprobs, dict) else None
        if not isinstance(numbers, list) or not numbers:
            self._refuse("no log-probs of the prompt (`echo`); serve the teacher with SGLang or vLLM")
        if len(numbers) - len(tokens) not in (0, 1):
            self._refuse(f"{len(numbers)} log-probs, but was asked for {len(tokens)} tokens")
        if (isinstance(ids, list) and ids != tokens) or (isinstance(texts, list) and len(texts) != len(numbers)):
            self._refuse("log-probs of other tokens than it was asked for; is its tokenizer the policy's?")
        mine = numbers[begin : len(tokens)]
        for place, value in enumerate(mine):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not _LEAST_LOGPROB <= value <= _MOST_LOGPROB:
                self._refuse(f"{self._told(value)} as log-prob of token {tokens[begin + place]}, at place {place}")
        known = texts[begin : len(tokens)] if isinstance(texts, list) and not isinstance(ids, list) else None
        with self._reading(reply):
            likeliest = self._likeliest(choice.get("prompt_logprobs"), begin, len(tokens), top_k)
        return ScoredTokens(np.array(mine, dtype=np.float32), known, *likeliest)

    def _likeliest(self, given: Any, begin: int, end: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probs of the likeliest tokens at the places from `begin`, [tokens, k] both.

        `given` are vLLM's for each of `end` places: token id -> log-prob, of the likeliest and of the given token.
        """
        if not top_k:
            nothing = np.zeros((end - begin, 0), dtype=np.float32)
            return nothing.astype(np.int32), nothing
        if not isinstance(given, list) or len(given) != end:
            self._refuse("no likeliest tokens (`prompt_logprobs`); serve the teacher with vLLM, or name an engine")
        best = [
            sorted((-float(each["logprob"]), int(token)) for token, each in place.items())[:top_k]
            for place in given[begin:]
        ]
        if len({len(place) for place in best}) != 1:
            self._refuse("another number of likeliest tokens at each place")
        table = np.array(best, dtype=np.float64)
        if not np.isfinite(table).all() or table[..., 0].min() < -_MOST_LOGPROB:
            self._refuse("likeliest tokens with values that are no log-probs")
        return table[..., 1].astype(np.int32), -table[..., 0].astype(np.float32)

    def _refuse(self, what: str) -> NoReturn:
        raise EndpointError(f"{self._url} has given {what}")

    def _answer(self, path: str, body: Mapping[str, Any]) -> Any:
        from openai import APIError

        try:
            # A raw request, so that only the given parameters are sent: servers differ in what they accept.
            asked = self._client.post(path, cast_to=object, body=body)
            return asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        except APIError as error:
            raise self._explained(error) from error
        except (ValueError, RecursionError) as error:
            raise EndpointError(f"{self._url} has answered in another form than JSON: {self._told(error)}") from error

    @contextmanager
    def _reading(self, reply: object) -> Iterator[None]:
        """Context that reads an answer of OpenAI's form. Raises EndpointError for others."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EndpointError(
                f"{self._url} has answered in a form that is not OpenAI's: {self._told(reply)}"
            ) from error

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _body(
        self, messages: Sequence[Mapping[str, str]], sampling: SamplingSpec, extra_body: Mapping[str, Any]
    ) -> dict[str, Any]:
        body = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            # Servers of open models accept these, others may reject them.
            **({"top_p": sampling.top_p} if sampling.top_p < 1 else {}),
            **({"top_k": sampling.top_k} if sampling.top_k > 0 else {}),
            **({"min_p": sampling.min_p} if sampling.min_p > 0 else {}),
            **({"stop_token_ids": list(sampling.stop_token_ids)} if sampling.stop_token_ids else {}),
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
            **({"ignore_eos": True} if sampling.ignore_eos else {}),
            **extra_body,
        }
        return {name: value for name, value in body.items() if value is not None}

    def _explained(self, error: APIError) -> EndpointError:
        from openai import APIConnectionError, APIStatusError, APITimeoutError

        from dagrl.bounded_http import AnswerError

        match error:
            case APITimeoutError():
                return EndpointError(f"{self._url} has not answered in time; raise timeout_s, or lower concurrency")
            case APIConnectionError():
                cause = error.__cause__ or error
                if isinstance(cause, AnswerError):
                    return EndpointError(f"{self._url} {cause}")
                return EndpointError(f"{self._url} cannot be reached: {self._told(cause)}; is its server running?")
            case APIStatusError():
                said = f"{self._url} answers {error.status_code}: {self._told(error.message)}"
                if error.status_code not in _SETTING_UP:
                    return EndpointError(said)
                key = f"the key in {self._key_env}" if self._key_env else "api_key_env, which is not set"
                what = f"the address and the model's name, {self._model}" if error.status_code == 404 else key
                return EndpointSetupError(f"{said}; look at {what}")
        return EndpointError(f"{self._url}: {self._told(error)}")

    def _told(self, text: object) -> str:
        """The server's message without the key, which some servers repeat."""
        said = str(text)
        return _short(said.replace(self._key, "***") if self._key else said)


def endpoint_of(node: EndpointNode) -> Endpoint:
    """The client of a node with an endpoint. Raises ValueError as `Endpoint`."""
    assert node.endpoint is not None and node.model is not None
    return Endpoint(
        node.endpoint, node.model, api_key_env=node.api_key_env, retries=node.retries, timeout_s=node.timeout_s
    )


def _key_of(api_key_env: str | None) -> str | None:
    if api_key_env is None:
        return None
    key = os.environ.get(api_key_env)
    if not key:
        raise ValueError(
            f"the environment variable {api_key_env}, which holds the endpoint's key, is not set in the workers on "
            f"{socket.gethostname()}; set it before the run, or before `ray start` if the cluster is already running"
        )
    return key


def _short(said: str) -> str:
    text = in_one_line(" ".join(said[: 10 * _SHOWN_CHARACTERS].split()))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ..."
