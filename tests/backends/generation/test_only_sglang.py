"""What only SGLang's servers do, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from completions import GREEDY, OLD, complete

from dagrl.backends.base import GenerationRequest
from dagrl.backends.serving.client import ServerError
from dagrl.config.schema import SamplingSpec

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("server_backend", ["sglang"], indirect=True)]
pytest.importorskip("sglang")


@pytest.fixture(scope="module")
def routing(start_engine, tmp_path_factory) -> Iterator[Any]:
    """A server that reports the experts of each token."""
    engine = start_engine(tmp_path_factory.mktemp("routing-logs"), enable_return_routed_experts=True)
    yield engine
    engine.close()


def test_the_limits_of_requests_follow_from_the_cache(server) -> None:
    assert (server.request_limits(64).chunk, server.request_limits(64).max_inflight) == (2, 10)
    assert server.request_limits(16376).max_inflight == 3, "the cache holds two that are half as long as they may be"
    with pytest.raises(ValueError, match=r"up to 16377 tokens does not fit into .* holds 16384 and takes one of 16376"):
        server.request_limits(16377)


def test_tokens_outside_the_vocabulary_are_refused(server) -> None:
    for prompt, begun in (([4, 15], []), ([-1], []), ([4], [15])):
        with pytest.raises(ValueError, match=r"prompt 0 has tokens that the model does not know: .* vocabulary has 15"):
            server.generate([GenerationRequest(np.array(prompt), 0, np.array(begun, dtype=int))], GREEDY)


def test_its_processes_meet_without_new_weights(server, requests) -> None:
    """What a server with several processes does after it has released memory."""
    before = [each.tokens.tolist() for each in complete(server, requests, GREEDY)]
    server._server.run(server._client.meet(), "meet", 30)
    assert server.policy_version == 0
    assert [each.tokens.tolist() for each in complete(server, requests, GREEDY)] == before


def test_a_start_that_sglang_refuses_says_why(start_engine, tmp_path) -> None:
    with pytest.raises(ServerError, match=r"SGLang server generator/0 did not start: .*divisible by page_size"):
        start_engine(tmp_path, chunked_prefill_size=6, page_size=4)


def test_each_response_of_a_group_has_the_routes_of_its_prompt(routing, model_of) -> None:
    """The prompt is computed once, by a request without a response."""
    generator = np.random.default_rng(1)
    prompt = generator.integers(3, 15, 100)
    sampling = SamplingSpec(max_new_tokens=12, ignore_eos=True)
    group = list(routing.generate([GenerationRequest(prompt, seed) for seed in range(4)], sampling))
    assert len({tuple(each.tokens) for each in group}) > 1
    for each in group:
        tokens = torch.tensor([*prompt, *each.tokens])
        with torch.no_grad():
            routed = model_of(OLD)(tokens[None], output_router_logits=True)
        places = torch.arange(len(prompt), len(tokens))
        logprobs = routed.logits[0].log_softmax(-1)[places - 1, tokens[places]]
        np.testing.assert_allclose(each.logprobs, logprobs.numpy(), atol=1e-4)
        chosen = torch.stack([layer[:-1].topk(2).indices for layer in routed.router_logits], dim=1)
        np.testing.assert_array_equal(np.sort(each.routed_experts), chosen.sort().values.numpy())
