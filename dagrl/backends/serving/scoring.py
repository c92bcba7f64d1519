"""Log-probs of given tokens on a server: prefill alone, many rows at a time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from dagrl.backends.serving.client import ResponseScores, ServerClient, ServerError
from dagrl.data.batch import Column

type Row = tuple[np.ndarray, np.ndarray]
"""Prompt and response of a row, int64."""


class TokenScorer:
    """Scores rows on a server, up to `at_once` of them at a time. Runs on the server's event loop."""

    def __init__(self, client: ServerClient, version: Callable[[], int], at_once: int) -> None:
        self._client, self._version = client, version
        self._room = asyncio.Semaphore(max(1, at_once))
        self._names = itertools.count()

    async def score(self, rows: Sequence[Row], top_k: int) -> list[ResponseScores]:
        """The scores of each response. The first failure cancels all of them."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._score(row, top_k)) for row in rows]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _score(self, row: Row, top_k: int) -> ResponseScores:
        prompt, response = row
        if not len(response):
            nothing, candidates = np.zeros(0, np.int64), np.zeros((0, top_k), np.int32)
            return ResponseScores(nothing, nothing.astype(np.float32), candidates, candidates.astype(np.float32))
        tokens = np.concatenate(row).tolist()
        async with self._room:
            scores = None
            while scores is None:
                # An abort applies to responses that the server samples concurrently.
                scores = await self._asked(tokens, len(prompt), top_k)
        check_scores(scores, response, "the server")
        return scores

    async def _asked(self, tokens: list[int], start: int, top_k: int) -> ResponseScores | None:
        rid = f"dagrl-score-{next(self._names)}."
        try:
            return await self._client.score(rid, tokens, start, str(self._version()), top_k)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                self._client.abort(rid)
            raise


def topk_columns(ids: Sequence[np.ndarray], logprobs: Sequence[np.ndarray], top_k: int) -> dict[str, Column]:
    """The candidates of all rows, each [tokens, up to `top_k`], as columns: -1 and -inf where the model has fewer."""
    offsets = np.cumsum([0, *map(len, ids)])
    no_ids, no_logprobs = np.zeros((0, top_k), np.int32), np.zeros((0, top_k), np.float32)

    def filled(parts: Sequence[np.ndarray], rest: float) -> list[np.ndarray]:
        return [np.pad(part, ((0, 0), (0, top_k - part.shape[1])), constant_values=rest) for part in parts]

    filled_ids, filled_logprobs = filled(ids, -1), filled(logprobs, -np.inf)
    return {
        "topk_ids": Column(np.concatenate([no_ids, *filled_ids]), offsets),
        "topk_logprob": Column(np.concatenate([no_logprobs, *filled_logprobs]), offsets),
    }


def check_scores(scores: ResponseScores, response: np.ndarray, who: str) -> None:
    """Raise ServerError unless `who` scored exactly the tokens of `response`, each with a number."""
    if len(scores.logprobs) != len(response):
        raise ServerError(
            f"{who} has returned {len(scores.logprobs)} log-probs of a response of {len(response)} tokens"
        )
    if not np.array_equal(scores.tokens, response):
        place = int(np.argmax(scores.tokens != response))
        raise ServerError(
            f"{who} has scored token {scores.tokens[place]} at place {place} of a response, which is {response[place]}"
        )
    if scores.top_ids.shape[:1] != response.shape or scores.top_ids.shape != scores.top_logprobs.shape:
        raise ServerError(f"{who} has returned {len(scores.top_ids)} lists of candidates of {len(response)} tokens")
    finite = np.isfinite(scores.logprobs)
    if not finite.all():
        place = int(np.argmin(finite))
        what = f"the log-prob {scores.logprobs[place]} of token {response[place]}"
        raise ServerError(f"{who} has returned {what}, at place {place} of a response of {len(response)} tokens")
