"""What only SGLang's servers do, on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from completions import GREEDY, OLD, complete, log_probs, scored

from dagrl.backends.base import GenerationRequest
from dagrl.backends.serving.client import ServerError

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("server_backend", ["sglang"], indirect=True)]
pytest.importorskip("sglang")


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


@pytest.mark.usefixtures("server")
def test_new_weights_drop_what_a_tower_made_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult, MultiModalStaticCache

    from dagrl.backends.sglang import loader
    from dagrl.backends.sglang.versions import image_module

    module = image_module()
    monkeypatch.setattr(loader, "_receive", lambda *received: None)
    monkeypatch.setattr(module, "embedding_cache", MultiModalStaticCache(1 << 20))
    module.embedding_cache.set(1, EmbeddingResult(embedding=torch.ones(4)))
    loader.update_weights(torch.nn.Module(), [("payload", torch.tensor([*b"route"], dtype=torch.uint8))])
    assert len(module.embedding_cache) == 0


def test_a_start_that_sglang_refuses_says_why(start_engine, tmp_path) -> None:
    with pytest.raises(ServerError, match=r"SGLang server generator/0 did not start: .*divisible by page_size"):
        start_engine(tmp_path, chunked_prefill_size=6, page_size=4)


def test_log_probs_of_rows_that_are_prefilled_in_chunks(start_engine, tmp_path, model_of) -> None:
    """As any row at the end of a batch may be: within the prompt, at its end, within the response."""
    engine = start_engine(tmp_path, chunked_prefill_size=64, max_running_requests=8)
    try:
        draw = np.random.default_rng(1).integers
        sizes = [(1, 200), (5, 300), (63, 65), (64, 64), (65, 1), (128, 1), (200, 250), (40, 20)]
        pairs = [tuple(draw(0, 15, size).tolist() for size in each) for each in sizes]
        for _ in range(2):
            column = scored(engine, pairs)
            for row, (prompt, response) in enumerate(pairs):
                after = log_probs(model_of(OLD), [*prompt, *response][:-1])[len(prompt) - 1 :].numpy()
                own = after[np.arange(len(response)), response]
                np.testing.assert_allclose(column[row], own, rtol=0, atol=1e-5)
    finally:
        engine.close()


@pytest.mark.usefixtures("server")
def test_a_gate_of_glm_routes_with_new_weights() -> None:
    """In bfloat16 SGLang computes with a copy that it makes at the first request."""
    from sglang.srt.models.glm4_moe import Glm4MoeGate

    from dagrl.backends.sglang.loader import renew_gates

    gate = Glm4MoeGate(SimpleNamespace(n_routed_experts=4, hidden_size=8)).to(torch.bfloat16)
    hidden = torch.randn(3, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        gate.weight.normal_()
        before = gate(hidden)
        read = gate._weight_fp32.data_ptr()
        gate.weight.normal_()
        renew_gates(torch.nn.Sequential(gate, torch.nn.Linear(8, 8)))
        after = gate(hidden)
    assert not torch.equal(before, after)
    assert torch.equal(after, torch.nn.functional.linear(hidden.float(), gate.weight.float()))
    assert gate._weight_fp32.data_ptr() == read, "captured graphs read this memory"
