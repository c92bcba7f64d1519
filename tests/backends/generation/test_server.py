"""Servers on the CPU: requests under way when weights change, and weights from other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from completions import GREEDY, LONG, NEW, OLD, complete, deviation, is_greedy
from transformers import PreTrainedModel

from dagrl.backends.base import Completion, GenerationRequest
from dagrl.config.schema import SamplingSpec
from dagrl.weight_sync.protocol import SendReport, refuse_unknown_names
from dagrl.weight_sync.receiver import Route
from dagrl.weight_sync.sender import WeightSender

pytestmark = pytest.mark.slow

ModelOf = Callable[[int], PreTrainedModel]


def during(
    engine: Any, requests: Sequence[GenerationRequest], act: Callable[[], None], tokens: int = 60
) -> list[Completion]:
    """What comes of long responses when `act` happens after so many tokens have been seen."""
    seen = engine.sampled_tokens
    done: list[Completion] = []
    thread = threading.Thread(target=lambda: done.extend(complete(engine, requests, LONG)))
    thread.start()
    deadline = time.monotonic() + 60
    while engine.sampled_tokens < seen + tokens:
        assert time.monotonic() < deadline, "no tokens"
        time.sleep(0.005)
    act()
    thread.join(timeout=300)
    assert len(done) == len(requests)
    return done


def test_an_abort_leaves_what_there_is(server, server_backend, requests, model_of: ModelOf) -> None:
    crowd = [*requests, *requests]
    done = during(server, crowd, server.abort)
    assert {each.finish_reason for each in done} == {"abort"}
    begun = [each for each in done if len(each.tokens)]
    assert begun and all(len(each.tokens) < 400 for each in done), "aborted while under way"
    assert len(begun) < len(crowd), "eight run at once, the others wait"
    for each in begun:
        assert is_greedy(model_of(OLD), crowd[each.index], each)
        assert deviation(model_of(OLD), crowd[each.index], each).max() <= 1e-4
        if server_backend == "vllm":
            assert len(each.routed_experts) == len(crowd[each.index].prompt) + len(each.tokens) - 1
    assert complete(server, requests[:1], GREEDY)[0].finish_reason != "abort", "an abort is for what was there"


def test_a_response_without_tokens_left_ends_at_once(server, requests) -> None:
    begun = [GenerationRequest(each.prompt, each.seed, np.full(400, 5)) for each in requests]
    assert {(len(each.tokens), each.finish_reason) for each in complete(server, begun, LONG)} == {(0, "length")}


def test_completions_arrive_without_a_thread_that_waits(server, requests) -> None:
    found: list[Completion] = []
    server.start_generating(requests, GREEDY, found.append).result(timeout=240)
    by_index = sorted(found, key=lambda completion: completion.index)
    expected = complete(server, requests, GREEDY)
    assert [each.tokens.tolist() for each in by_index] == [each.tokens.tolist() for each in expected]
    # One that is cancelled ends in the server, too.
    call = server.start_generating(requests[:1], LONG, found.append)
    for under_way in (True, False):
        until = time.monotonic() + 30
        while bool(server._responses._under_way) != under_way:
            assert time.monotonic() < until
            time.sleep(0.001)
        call.cancel()
    assert len(found) == len(requests)


def test_an_abandoned_call_leaves_the_server_to_others(server, requests) -> None:
    short = GenerationRequest(requests[0].prompt, 0, np.full(399, 5))
    responses = server.generate([short, *requests], LONG)
    assert next(responses).index == 0
    responses.close()
    assert complete(server, requests, GREEDY)[0].finish_reason != "abort"


def test_an_update_by_abort_ends_what_is_under_way(server, requests, weights_of) -> None:
    server.pause = "abort"
    done = during(server, requests, lambda: server.load_weights(iter([weights_of(NEW)]), 1))
    assert {each.finish_reason for each in done} == {"abort"} and {each.policy_version for each in done} == {0}


def test_an_update_by_retraction_continues_with_a_cache_of_the_new_weights(
    server, requests, model_of: ModelOf, weights_of
) -> None:
    server.pause = "retract"
    done = during(server, requests, lambda: server.load_weights(iter([weights_of(NEW)]), 1))
    assert {len(each.tokens) for each in done} == {400} and {each.policy_version for each in done} == {0}
    for each in done:
        old = deviation(model_of(OLD), requests[each.index], each) <= 1e-3
        new = deviation(model_of(NEW), requests[each.index], each) <= 1e-3
        change = int(np.argmin(old))
        assert 0 < change < 400 and old[:change].all() and new[change:].all()


def test_an_update_in_place_keeps_the_old_cache_to_itself(server, requests, model_of: ModelOf, weights_of) -> None:
    server.pause = "in_place"
    done = during(server, requests, lambda: server.load_weights(iter([weights_of(NEW)]), 1))
    assert {len(each.tokens) for each in done} == {400} and {each.policy_version for each in done} == {0}
    deviations = [deviation(model_of(NEW), requests[each.index], each) for each in done]
    assert all(each[-1] > 1e-4 for each in deviations), "the end was not computed with a cache of the new weights"
    for request, completion in zip(requests, complete(server, requests, GREEDY), strict=True):
        assert completion.policy_version == 1
        assert deviation(model_of(NEW), request, completion).max() <= 1e-5


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


# -- weights that come from another process


@pytest.mark.parametrize("reach", ["cuda_ipc", "broadcast"])
def test_weights_reach_the_servers_processes_automatically(
    server, requests, model_of: ModelOf, weights_of, sender_of, reach
) -> None:
    """Shared memory and gloo stand for CUDA IPC and NCCL. The first time they are loaded, later copied."""
    for version, seed in enumerate((NEW, OLD, NEW), start=3):
        sender = sender_of(reach, weights_of(seed))
        sent = taken(server, sender, version)
        assert sent.nbytes == sum(tensor.nbytes for _, tensor in weights_of(seed))
        for request, completion in zip(requests, complete(server, requests, GREEDY), strict=True):
            assert completion.policy_version == version
            assert deviation(model_of(seed), request, completion).max() <= 1e-5


def test_a_tensor_that_the_model_lacks_is_named(server, weights_of, sender_of) -> None:
    extra = [*weights_of(NEW), ("model.layers.1.mlp.experts.4.up_proj.weight", torch.zeros(32, 32))]
    with pytest.raises(ValueError, match=r"the generator has no parameter for model.layers.1.mlp.experts.4.up_proj"):
        refuse_unknown_names([taken(server, sender_of("cuda_ipc", extra), 3)])
    with pytest.raises(ValueError, match=r"no parameter for model.layers.1.mlp.experts.4.up_proj.weight; use the same"):
        server.load_weights(iter([extra]), 3)
    with pytest.raises(AssertionError, match="before the first weights"):
        server.generate([GenerationRequest(np.array([4]), 0)], GREEDY)


@pytest.mark.parametrize("reach", ["cuda_ipc", "broadcast"])
def test_a_server_outlives_weights_that_do_not_fit(server, requests, weights_of, sender_of, reach) -> None:
    missing = [(name, tensor) for name, tensor in weights_of(NEW) if "experts.2.down_proj" not in name]
    misfit = [(name, tensor[:8] if "layers.1.self_attn.k_proj" in name else tensor) for name, tensor in weights_of(NEW)]
    for tensors, complaint in (
        (
            misfit,
            r"rank 0 of its server\): the server's model could not load .*layers.1.self_attn.k_proj.weight \[8, 32\]",
        ),
        (
            missing,
            r"sent no weights .*: model.layers.0.mlp.experts.(routed_experts.)?w2_weight \(3072 of 4096 elements\)",
        ),
    ):
        with pytest.raises(ValueError, match=complaint):
            taken(server, sender_of(reach, tensors), 3)
    taken(server, sender_of(reach, weights_of(OLD)), 4)
    assert complete(server, requests, GREEDY)[0].policy_version == 4


def test_a_server_outlives_a_sender_that_is_gone(
    server, engines, server_backend, requests, weights_of, sender_of
) -> None:
    sender = sender_of("broadcast", weights_of(NEW))
    address = sender.offer().address
    sender.close()
    server.update_weights(Route(3, {"": address}, 1.0), 3)
    assert "no new weights: the sender of weights does not answer" in engines.log(server_backend)
    server.load_weights(iter([weights_of(OLD)]), 4)
    assert complete(server, requests, GREEDY)[0].policy_version == 4


def taken(engine: Any, sender: WeightSender, version: int) -> SendReport:
    """A sync of the weights that `sender` has, compared."""
    address = sender.offer().address
    engine_takes = threading.Thread(target=engine.update_weights, args=(Route(version, {"": address}, 30.0), version))
    engine_takes.start()
    try:
        return sender.send(version, [1], passes=2)
    finally:
        engine_takes.join(timeout=120)
