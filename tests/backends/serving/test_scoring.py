"""Rows that are scored on a server: how many at a time, and what a server may not answer."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dagrl.backends.serving.client import ResponseScores, ServerError
from dagrl.backends.serving.scoring import TokenScorer, topk_columns

ROWS = [(np.array([1, 2]), np.array([3, 4, 5][: 1 + row % 3])) for row in range(12)]


class Client:
    """Scores each token by its id; changed answers are a test's."""

    def __init__(self, change=lambda scores: scores) -> None:
        self.change = change
        self.running, self.most, self.asked, self.aborted = 0, 0, 0, []

    async def score(self, rid, tokens, start, cache_key, top_k=0):
        self.asked += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.005)
        finally:
            self.running -= 1
        given = np.array(tokens[start:], np.int64)
        places = np.tile(np.arange(top_k, dtype=np.int32), (len(given), 1))
        return self.change(ResponseScores(given, -given.astype(np.float32), places, -places.astype(np.float32)))

    def abort(self, rid) -> None:
        self.aborted.append(rid)


def score(client, rows=ROWS, at_once=4, top_k=0):
    return asyncio.run(TokenScorer(client, lambda: 0, at_once).score(rows, top_k))


def test_rows_come_in_their_order_and_so_many_at_a_time() -> None:
    client = Client()
    scored = score(client)
    assert [each.logprobs.tolist() for each in scored] == [(-response).tolist() for _, response in ROWS]
    assert (client.most, client.asked) == (4, 12)


def test_an_aborted_row_is_asked_for_again() -> None:
    client = Client()
    client.change = lambda scores: None if client.asked % 2 else scores
    assert len(score(client, at_once=1)) == 12
    assert client.asked == 24


def test_a_row_without_a_response_is_not_asked_for() -> None:
    client = Client()
    (nothing,) = score(client, [(np.array([1]), np.zeros(0, np.int64))], top_k=3)
    assert (len(nothing.logprobs), nothing.top_ids.shape, client.asked) == (0, (0, 3), 0)


def test_candidates_that_the_model_does_not_have_are_none() -> None:
    scored = score(Client(), ROWS[:3], top_k=2)
    columns = topk_columns([each.top_ids for each in scored], [each.top_logprobs for each in scored], 4)
    assert [columns["topk_ids"][row].shape for row in range(3)] == [(1, 4), (2, 4), (3, 4)]
    assert columns["topk_ids"].values[0].tolist() == [0, 1, -1, -1]
    assert columns["topk_logprob"].values[0].tolist() == [0, -1, -np.inf, -np.inf]


LIES = {
    "too few": (lambda each: _with(each, slice(0, -1)), "has returned 1 log-probs of a response of 2 tokens"),
    "too many": (lambda each: _with(each, [0, 1, 1]), "has returned 3 log-probs of a response of 2 tokens"),
    "none": (lambda each: _with(each, slice(0, 0)), "has returned 0 log-probs"),
    "other tokens": (lambda each: _changed(each, tokens=each.tokens + 1), "scored token 4 at place 0 .* which is 3"),
    "not a number": (lambda each: _changed(each, logprobs=each.logprobs * np.nan), "the log-prob nan of token 3"),
    "infinite": (lambda each: _changed(each, logprobs=each.logprobs * np.inf), "the log-prob -inf of token 3"),
    "candidates of fewer tokens": (lambda each: _changed(each, top_ids=each.top_ids[1:]), "1 lists of candidates of 2"),
}


@pytest.mark.parametrize(("lie", "told"), LIES.values(), ids=LIES)
def test_answers_that_are_not_the_scores_are_refused(lie, told: str) -> None:
    with pytest.raises(ServerError, match=told):
        score(Client(lie), ROWS[1:2], top_k=2)


def test_a_failure_ends_the_other_requests() -> None:
    client = Client(LIES["too few"][0])
    with pytest.raises(ServerError):
        score(client, at_once=12)
    assert client.running == 0


def _with(scores: ResponseScores, places) -> ResponseScores:
    return ResponseScores(
        *(getattr(scores, name)[places] for name in ("tokens", "logprobs", "top_ids", "top_logprobs"))
    )


def _changed(scores: ResponseScores, **fields) -> ResponseScores:
    own = {name: getattr(scores, name) for name in ("tokens", "logprobs", "top_ids", "top_logprobs")}
    return ResponseScores(**(own | fields))
