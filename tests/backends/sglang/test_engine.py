"""A real SGLang server on the CPU: what it samples is what the model says, whatever happens in between."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from dagrl.backends.base import Completion, GenerationRequest
from dagrl.backends.sglang.engine import SglangEngine
from dagrl.backends.sglang.server import ServerError, ServerLostError
from dagrl.config.residency import Residency
from dagrl.config.schema import SamplingSpec
from dagrl.weight_sync.protocol import SendReport, refuse_unknown_names
from dagrl.weight_sync.receiver import Route
from dagrl.weight_sync.sender import WeightSender

pytestmark = pytest.mark.slow

GREEDY = SamplingSpec(max_new_tokens=16, temperature=0)
LONG = SamplingSpec(max_new_tokens=400, temperature=0, ignore_eos=True)
POSITIONS = 512
"""That the model knows."""
OLD, NEW = 5, 6
"""Seeds of the weights that the server starts with, and of others."""
ModelOf = Callable[[int], PreTrainedModel]


def complete(engine: SglangEngine, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> list[Completion]:
    """Completions in the order of their requests."""
    done = sorted(engine.generate(requests, sampling), key=lambda completion: completion.index)
    assert [completion.index for completion in done] == list(range(len(requests)))
    return done


@torch.inference_mode()
def log_probs(model: PreTrainedModel, tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Of every next token behind each of `tokens`: [tokens, vocabulary]."""
    return (model(torch.tensor([list(tokens)])).logits[0] / temperature).log_softmax(-1)


def deviation(
    model: PreTrainedModel, request: GenerationRequest, completion: Completion, temperature: float = 1.0
) -> np.ndarray:
    """How far each token's log-prob is from the model's."""
    sequence = [*request.prompt.tolist(), *request.begun.tolist(), *completion.tokens.tolist()]
    count = len(completion.tokens)
    expected = log_probs(model, sequence[:-1], temperature)[-count:]
    picked = expected.gather(1, torch.tensor(sequence[-count:]).unsqueeze(1)).squeeze(1)
    return np.abs(picked.numpy() - completion.logprobs)


def is_greedy(model: PreTrainedModel, prefix: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether each of `tokens` is the model's likeliest behind those before it."""
    expected = log_probs(model, [*prefix, *tokens][:-1])[-len(tokens) :].argmax(-1)
    return expected.tolist() == list(tokens)


def during(
    engine: SglangEngine, requests: Sequence[GenerationRequest], act: Callable[[], None], tokens: int = 60
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
    thread.join(timeout=120)
    assert len(done) == len(requests)
    return done


def test_greedy_tokens_and_log_probs_are_the_models(server, requests, model_of: ModelOf) -> None:
    for request, completion in zip(requests, complete(server, requests, GREEDY), strict=True):
        assert is_greedy(model_of(OLD), request.prompt, completion.tokens)
        assert deviation(model_of(OLD), request, completion).max() <= 1e-5
        assert completion.tokens.dtype == np.int64 and completion.logprobs.dtype == np.float32
        assert completion.policy_version == 0 and completion.routed_experts is None
        stopped = completion.tokens[-1] == 1
        assert (completion.finish_reason == "stop") == stopped and (stopped or len(completion.tokens) == 16)


def test_log_probs_are_of_logits_over_temperature_before_top_p_and_top_k(server, requests, model_of: ModelOf) -> None:
    sampling = SamplingSpec(max_new_tokens=12, temperature=0.6, top_p=0.8, top_k=4)
    for request, completion in zip(requests, complete(server, requests, sampling), strict=True):
        assert deviation(model_of(OLD), request, completion, 0.6).max() <= 1e-5
        ranks = log_probs(model_of(OLD), [*request.prompt, *completion.tokens][:-1])[-len(completion.tokens) :]
        likelier = (ranks > ranks.gather(1, torch.from_numpy(completion.tokens).unsqueeze(1))).sum(1)
        assert int(likelier.max()) < 4


def test_min_p_leaves_tokens_that_are_near_the_likeliest(server, requests, model_of: ModelOf) -> None:
    sampling = SamplingSpec(max_new_tokens=12, min_p=0.4)
    for request, completion in zip(requests, complete(server, requests, sampling), strict=True):
        assert deviation(model_of(OLD), request, completion).max() <= 1e-5
        ranks = log_probs(model_of(OLD), [*request.prompt, *completion.tokens][:-1])[-len(completion.tokens) :]
        drawn = ranks.gather(1, torch.from_numpy(completion.tokens).unsqueeze(1)).squeeze(1)
        assert (drawn >= ranks.amax(1) + np.log(0.4) - 1e-5).all()


def test_the_token_that_stops_a_response_is_part_of_it(server, requests) -> None:
    free = complete(server, requests, SamplingSpec(max_new_tokens=12, temperature=0, ignore_eos=True))
    stop = int(free[4].tokens[3])
    stopping = SamplingSpec(max_new_tokens=12, temperature=0, stop_token_ids=(stop,))
    for whole, completion in zip(free, complete(server, requests, stopping), strict=True):
        ends = [place for place, token in enumerate(whole.tokens) if token in (stop, 1)]
        expected = whole.tokens[: ends[0] + 1] if ends else whole.tokens
        assert completion.tokens.tolist() == expected.tolist()
        assert completion.finish_reason == ("stop" if ends else "length")


def test_a_response_may_use_all_of_the_models_positions_and_go_on_within_the_last(server, model_of: ModelOf) -> None:
    prompt = np.random.default_rng(8).integers(3, 15, size=POSITIONS - 12)
    (whole,) = complete(server, [GenerationRequest(prompt, 0)], LONG.model_copy(update={"max_new_tokens": 12}))
    assert (len(whole.tokens), whole.finish_reason) == (12, "length")
    assert deviation(model_of(OLD), GenerationRequest(prompt, 0), whole).max() <= 1e-5
    for there in (6, 11):
        begun = GenerationRequest(prompt, 0, whole.tokens[:there])
        (rest,) = complete(server, [begun], LONG.model_copy(update={"max_new_tokens": 12}))
        assert rest.tokens.tolist() == whole.tokens[there:].tolist()


def test_a_response_goes_on_behind_its_beginning(server, requests) -> None:
    whole = complete(server, requests, LONG.model_copy(update={"max_new_tokens": 12}))
    begun = [
        GenerationRequest(each.prompt, each.seed, done.tokens[:5]) for each, done in zip(requests, whole, strict=True)
    ]
    rest = complete(server, begun, LONG.model_copy(update={"max_new_tokens": 12}))
    for all_, later in zip(whole, rest, strict=True):
        assert later.tokens.tolist() == all_.tokens[5:].tolist()
        np.testing.assert_allclose(later.logprobs, all_.logprobs[5:], atol=1e-5)
    nothing_left = complete(server, begun, LONG.model_copy(update={"max_new_tokens": 5}))
    assert {(len(each.tokens), each.finish_reason) for each in nothing_left} == {(0, "length")}


def test_an_abort_leaves_what_there_is(server, requests, model_of: ModelOf) -> None:
    crowd = [*requests, *requests]
    done = during(server, crowd, server.abort)
    assert {each.finish_reason for each in done} == {"abort"}
    begun = [each for each in done if len(each.tokens)]
    assert begun and all(len(each.tokens) < 400 for each in done), "aborted while under way"
    assert len(begun) < len(crowd), "eight run at once, the others wait"
    for each in begun:
        assert is_greedy(model_of(OLD), crowd[each.index].prompt, each.tokens)
        assert deviation(model_of(OLD), crowd[each.index], each).max() <= 1e-4
    assert complete(server, requests[:1], GREEDY)[0].finish_reason != "abort", "an abort is for what was there"


def test_the_server_is_there_for_others_when_somebody_stops_listening(server, requests) -> None:
    short = GenerationRequest(requests[0].prompt, 0, np.full(399, 5))
    responses = server.generate([short, *requests], LONG)
    assert next(responses).index == 0
    responses.close()
    assert complete(server, requests, GREEDY)[0].finish_reason != "abort"


def test_a_server_that_says_nothing_is_not_waited_for_without_a_bound(server, requests, monkeypatch) -> None:
    monkeypatch.setattr("dagrl.backends.sglang.engine._POLL_S", 0.1)
    monkeypatch.setattr(server, "_timeout_s", 1.0)
    [scheduler] = schedulers()
    scheduler.suspend()
    try:
        with pytest.raises(ServerLostError, match="SGLang has not responded for 1 s"):
            complete(server, requests, GREEDY)
    finally:
        scheduler.resume()
    assert complete(server, requests, GREEDY)[0].finish_reason != "abort"


def test_calls_from_several_threads_share_the_server(server, requests) -> None:
    alone = [each.tokens.tolist() for each in complete(server, requests, GREEDY)]
    found: dict[int, list[list[int]]] = {}

    def call(number: int) -> None:
        found[number] = [each.tokens.tolist() for each in complete(server, requests, GREEDY)]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == dict.fromkeys(range(3), alone)


def test_later_samples_are_of_the_new_weights_and_version(restored, requests, model_of: ModelOf, weights_of) -> None:
    complete(restored, requests, GREEDY)  # fills the cache under the old ones
    restored.load_weights(iter([weights_of(NEW)]), 7)
    assert restored.policy_version == 7
    for request, completion in zip(requests, complete(restored, requests, GREEDY), strict=True):
        assert completion.policy_version == 7
        assert deviation(model_of(NEW), request, completion).max() <= 1e-5


def test_an_update_by_abort_ends_what_is_under_way(restored, requests, weights_of) -> None:
    restored.pause = "abort"
    done = during(restored, requests, lambda: restored.load_weights(iter([weights_of(NEW)]), 1))
    assert {each.finish_reason for each in done} == {"abort"} and {each.policy_version for each in done} == {0}


def test_an_update_by_retraction_goes_on_with_a_cache_of_the_new_weights(
    restored, requests, model_of: ModelOf, weights_of
) -> None:
    restored.pause = "retract"
    done = during(restored, requests, lambda: restored.load_weights(iter([weights_of(NEW)]), 1))
    assert {len(each.tokens) for each in done} == {400} and {each.policy_version for each in done} == {0}
    for each in done:
        old = deviation(model_of(OLD), requests[each.index], each) <= 1e-3
        new = deviation(model_of(NEW), requests[each.index], each) <= 1e-3
        change = int(np.argmin(old))
        assert 0 < change < 400 and old[:change].all() and new[change:].all()


def test_an_update_in_place_keeps_the_old_cache_to_itself(restored, requests, model_of: ModelOf, weights_of) -> None:
    restored.pause = "in_place"
    done = during(restored, requests, lambda: restored.load_weights(iter([weights_of(NEW)]), 1))
    assert {len(each.tokens) for each in done} == {400} and {each.policy_version for each in done} == {0}
    deviations = [deviation(model_of(NEW), requests[each.index], each) for each in done]
    assert all(each[-1] > 1e-4 for each in deviations), "the end was not computed with a cache of the new weights"
    for request, completion in zip(requests, complete(restored, requests, GREEDY), strict=True):
        assert completion.policy_version == 1
        assert deviation(model_of(NEW), request, completion).max() <= 1e-5


# -- weights that come from another process


@pytest.mark.parametrize("reach", ["cuda_ipc", "broadcast"])
def test_weights_reach_the_servers_processes_by_themselves(
    restored, requests, model_of: ModelOf, weights_of, sender_of, reach
) -> None:
    """Shared memory and gloo stand for CUDA IPC and NCCL. The first time they are loaded, later copied."""
    for version, seed in enumerate((NEW, OLD, NEW), start=3):
        sender = sender_of(reach, weights_of(seed))
        sent = taken(restored, sender, version)
        assert sent.nbytes == sum(tensor.nbytes for _, tensor in weights_of(seed))
        for request, completion in zip(requests, complete(restored, requests, GREEDY), strict=True):
            assert completion.policy_version == version
            assert deviation(model_of(seed), request, completion).max() <= 1e-5


def test_a_tensor_without_a_place_is_told(restored, weights_of, sender_of) -> None:
    extra = [*weights_of(NEW), ("model.layers.1.mlp.experts.4.up_proj.weight", torch.zeros(24, 32))]
    with pytest.raises(ValueError, match=r"the generator has no parameter for model.layers.1.mlp.experts.4.up_proj"):
        refuse_unknown_names([taken(restored, sender_of("cuda_ipc", extra), 3)])
    with pytest.raises(ValueError, match=r"no parameter for model.layers.1.mlp.experts.4.up_proj.weight; use the same"):
        restored.load_weights(iter([extra]), 3)
    with pytest.raises(AssertionError, match="before the first weights"):
        restored.generate([GenerationRequest(np.array([4]), 0)], GREEDY)


@pytest.mark.parametrize("reach", ["cuda_ipc", "broadcast"])
def test_a_server_outlives_weights_that_do_not_fit(restored, requests, weights_of, sender_of, reach) -> None:
    missing = [(name, tensor) for name, tensor in weights_of(NEW) if "experts.2.down_proj" not in name]
    misfit = [(name, tensor[:8] if "layers.1.self_attn.k_proj" in name else tensor) for name, tensor in weights_of(NEW)]
    for tensors, complaint in (
        (
            misfit,
            r"rank 0 of its server\): the server's model could not load .*layers.1.self_attn.k_proj.weight \[8, 32\]",
        ),
        (missing, r"sent no weights .*: model.layers.0.mlp.experts.w2_weight \(2304 of 3072 elements\)"),
    ):
        with pytest.raises(ValueError, match=complaint):
            taken(restored, sender_of(reach, tensors), 3)
    taken(restored, sender_of(reach, weights_of(OLD)), 4)
    assert complete(restored, requests, GREEDY)[0].policy_version == 4


def test_a_server_outlives_a_sender_that_is_gone(restored, requests, weights_of, sender_of) -> None:
    sender = sender_of("broadcast", weights_of(NEW))
    address = sender.offer().address
    sender.close()
    restored.update_weights(Route(3, {"": address}, 1.0), 3)
    log = next(restored._server._log_prefix.parent.glob("*-tp0.log")).read_text()
    assert "no new weights: the sender of weights does not answer" in log
    restored.load_weights(iter([weights_of(OLD)]), 4)
    assert complete(restored, requests, GREEDY)[0].policy_version == 4


def taken(engine: SglangEngine, sender: WeightSender, version: int) -> SendReport:
    """A sync of the weights that `sender` has, compared."""
    address = sender.offer().address
    engine_takes = threading.Thread(target=engine.update_weights, args=(Route(version, {"": address}, 30.0), version))
    engine_takes.start()
    try:
        return sender.send(version, [1], passes=2)
    finally:
        engine_takes.join(timeout=30)


def test_prompts_that_cannot_be_answered_are_refused(server) -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty; a model needs at least one token"):
        server.generate([GenerationRequest(np.array([3]), 0), GenerationRequest(np.array([], dtype=int), 0)], GREEDY)
    with pytest.raises(
        ValueError, match=r"500 tokens and max_new_tokens 16 do not fit into the server's context of 512"
    ):
        server.generate([GenerationRequest(np.full(500, 4), 0)], GREEDY)
    for prompt, begun in (([4, 15], []), ([-1], []), ([4], [15])):
        with pytest.raises(ValueError, match=r"prompt 0 has tokens that the model does not know: .* vocabulary has 15"):
            server.generate([GenerationRequest(np.array(prompt), 0, np.array(begun, dtype=int))], GREEDY)


def test_no_prompts_give_no_responses(server) -> None:
    assert complete(server, [], GREEDY) == []


def test_the_server_says_what_it_can_take(server) -> None:
    assert (server.request_limits(64).chunk, server.request_limits(64).max_inflight) == (2, 10)
    assert server.request_limits(16376).max_inflight == 3, "the cache holds two that are half as long as they may be"
    with pytest.raises(ValueError, match=r"up to 16377 tokens does not fit into .* holds 16384 and takes one of 16376"):
        server.request_limits(16377)


def test_a_sleeper_wakes_up_to_what_it_was(server, requests) -> None:
    before = [each.tokens.tolist() for each in complete(server, requests, GREEDY)]
    for depth in (Residency.WEIGHTS, Residency.ASLEEP):
        assert server.sleep(depth).freed_gib == 0
        server.wake(Residency.WEIGHTS)
        server.wake(Residency.AWAKE)
    assert [each.tokens.tolist() for each in complete(server, requests, GREEDY)] == before


def test_its_processes_meet_without_new_weights(server, requests) -> None:
    """What one with several processes does when it has given memory back."""
    before = [each.tokens.tolist() for each in complete(server, requests, GREEDY)]
    server._server.run(server._client.meet(), "meet", 30)
    assert server.policy_version == 0
    assert [each.tokens.tolist() for each in complete(server, requests, GREEDY)] == before


def test_a_start_that_sglang_refuses_says_why(server, start_engine, tmp_path) -> None:
    with pytest.raises(ServerError, match=r"SGLang server generator/0 did not start: .*divisible by page_size"):
        start_engine(tmp_path, chunked_prefill_size=6, page_size=4)


def test_a_start_that_takes_too_long_is_given_up(server, start_engine, tmp_path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ServerError, match=r"SGLang server generator/0 was not ready after 0\.01 s"):
        start_engine(tmp_path, start_timeout_s=0.01)
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)
    assert len(schedulers()) == 1, "what was started for nobody is gone"


def test_a_server_that_dies_ends_what_waits_for_it(server, requests) -> None:
    """The last test: nobody brings the server back."""

    [scheduler] = schedulers()
    failed: list[BaseException] = []
    thread = threading.Thread(target=lambda: failed.append(_failure(server, requests)))
    thread.start()
    os.kill(scheduler.pid, signal.SIGKILL)
    thread.join(timeout=30)
    dead = r"a process of SGLang server generator/0 has died \(exit code -9\)"
    assert re.match(dead, str(failed[0]))
    with pytest.raises(ServerError, match=dead):
        complete(server, requests, GREEDY)
    server.close()
    assert not schedulers()


def schedulers() -> list[psutil.Process]:
    """SGLang's processes, dead ones that nobody has asked about too."""
    return [each for each in psutil.Process().children() if each.name().startswith("sglang")]


def _failure(server: SglangEngine, requests: Sequence[GenerationRequest]) -> BaseException:
    with pytest.raises(ServerError) as caught:
        complete(server, requests, LONG)
    return caught.value
