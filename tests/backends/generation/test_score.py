"""Log-probs of given tokens, in each installed backend with servers: those of transformers, by prefill alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from completions import GREEDY, LONG, OLD, POSITIONS, batch_of, complete, log_probs, scored
from transformers import PreTrainedModel

from dagrl.backends.base import GenerationRequest, TokenOutputs
from dagrl.config.residency import Residency

pytestmark = pytest.mark.slow

ModelOf = Callable[[int], PreTrainedModel]
type Pair = tuple[list[int], list[int]]


def expected(model: PreTrainedModel, prompt: list[int], response: list[int]) -> np.ndarray:
    """The log-probs of `response`, by transformers alone: [tokens]."""
    after = log_probs(model, [*prompt, *response][:-1])[len(prompt) - 1 :].numpy()
    return after[np.arange(len(response)), response]


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    """Rows of many lengths; some share their prompts, some are equal, and one has no response."""
    generator = np.random.default_rng(7)
    sizes = [(1, 1), (1, 9), (3, 1), (5, 8), (40, 3), (64, 70), (2, 0), (130, 33), (17, 200)]
    drawn = [tuple(generator.integers(0, 15, size=size).tolist() for size in each) for each in sizes]
    shared = [(drawn[5][0], generator.integers(0, 15, size=size).tolist()) for size in (4, 31, 70)]
    return [*drawn, *shared, drawn[3], drawn[5]]


def test_log_probs_are_the_models(server, pairs, model_of: ModelOf) -> None:
    column = scored(server, pairs)
    assert column.values.dtype == np.float32
    assert column.lengths.tolist() == [len(response) for _, response in pairs]
    for row, (prompt, response) in enumerate(pairs):
        if response:
            np.testing.assert_allclose(column[row], expected(model_of(OLD), prompt, response), rtol=0, atol=1e-5)


def test_they_do_not_depend_on_what_the_cache_holds(server, pairs) -> None:
    first, again = scored(server, pairs), scored(server, pairs[::-1])
    for row in range(len(pairs)):
        np.testing.assert_allclose(again[len(pairs) - 1 - row], first[row], rtol=0, atol=1e-5)


def test_those_of_a_greedy_response_are_those_that_it_was_sampled_with(server, requests) -> None:
    done = complete(server, requests, GREEDY)
    pairs = [(request.prompt.tolist(), each.tokens.tolist()) for request, each in zip(requests, done, strict=True)]
    column = scored(server, pairs)
    for row, each in enumerate(done):
        np.testing.assert_allclose(column[row], each.logprobs, rtol=0, atol=1e-5)


def test_more_rows_than_requests_at_once(server, model_of: ModelOf) -> None:
    pairs: list[Pair] = [([3 + row % 12, 4], [5, 6, 3 + row % 7]) for row in range(50)]
    column = scored(server, pairs)
    assert column.lengths.tolist() == [3] * 50
    for row in (0, 11, 49):
        np.testing.assert_allclose(column[row], expected(model_of(OLD), *pairs[row]), rtol=0, atol=1e-5)


def test_no_rows(server) -> None:
    assert len(scored(server, [])) == 0


def test_beside_responses_that_are_sampled_and_aborted(server, requests, pairs, model_of: ModelOf) -> None:
    """An abort ends responses, but not rows that are scored meanwhile."""
    sampling = threading.Thread(target=lambda: list(server.generate(requests * 4, LONG)))
    sampling.start()
    try:
        column = None
        for _ in range(3):
            column = scored(server, pairs)
            server.abort()
    finally:
        server.abort()
        sampling.join()
    assert column is not None
    np.testing.assert_allclose(column[3], expected(model_of(OLD), *pairs[3]), rtol=0, atol=1e-5)


def test_a_row_may_fill_the_context(server, model_of: ModelOf) -> None:
    room = POSITIONS - server._kept_back
    tokens = np.random.default_rng(2).integers(3, 15, size=room).tolist()
    pair = (tokens[:30], tokens[30:])
    np.testing.assert_allclose(scored(server, [pair])[0], expected(model_of(OLD), *pair), rtol=0, atol=1e-5)
    with pytest.raises(
        ValueError, match=f"has {room + 1} tokens, and the server has room for {room}; .*longer context"
    ):
        scored(server, [(tokens[:30], [*tokens[30:], 4])])


@pytest.mark.parametrize("pair", [([3], [99]), ([99], [3]), ([3], [-1])])
def test_tokens_that_the_model_does_not_know_are_refused(server, pair) -> None:
    with pytest.raises(ValueError, match="has tokens that the model does not know"):
        scored(server, [([3], [4]), pair])


@pytest.mark.parametrize("count", [1, 4, 15, 18])
def test_the_likeliest_tokens(server, pairs, model_of: ModelOf, count: int) -> None:
    """The model has 15 tokens: further candidates are none."""
    how = {"temperature": 1.0, "tokens_per_micro_batch": 1}
    columns = server.token_outputs(batch_of(pairs), TokenOutputs(top_k=count), **how)
    ids, logprobs = columns["topk_ids"], columns["topk_logprob"]
    assert (ids.values.dtype, logprobs.values.dtype) == (np.int32, np.float32)
    np.testing.assert_allclose(columns["logprob"].values, scored(server, pairs).values, rtol=0, atol=1e-5)
    for row, (prompt, response) in enumerate(pairs):
        assert ids[row].shape == logprobs[row].shape == (len(response), count)
        if not response:
            continue
        after = log_probs(model_of(OLD), [*prompt, *response][:-1])[len(prompt) - 1 :]
        values, likeliest = after.topk(min(count, 15))
        np.testing.assert_allclose(logprobs[row][:, :15], values.numpy(), rtol=0, atol=1e-5)
        assert ids[row][:, :15].tolist() == likeliest.tolist()
        assert (ids[row][:, 15:] == -1).all() and np.isneginf(logprobs[row][:, 15:]).all()


def test_candidates_of_no_rows(server) -> None:
    columns = server.token_outputs(batch_of([]), TokenOutputs(top_k=3), temperature=1.0, tokens_per_micro_batch=1)
    assert columns["topk_ids"].values.shape == columns["topk_logprob"].values.shape == (0, 3)
    assert len(columns["topk_ids"]) == 0


def test_after_a_sleep_it_scores_as_before(server, pairs) -> None:
    before = scored(server, pairs)
    server.sleep(Residency.ASLEEP)
    server.wake(Residency.AWAKE)
    np.testing.assert_allclose(scored(server, pairs).values, before.values, rtol=0, atol=1e-5)


def test_a_request_may_be_sampled_after_it(server, requests: list[GenerationRequest], pairs) -> None:
    scored(server, pairs)
    assert [len(each.tokens) for each in complete(server, requests, GREEDY)]
