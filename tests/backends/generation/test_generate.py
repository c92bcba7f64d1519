"""What every engine that generates does: tokens and log-probs are the model's, in each installed backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from completions import ENDS, GREEDY, LONG, NEW, OLD, POSITIONS, complete, deviation, is_greedy, kept, log_probs_of
from transformers import PreTrainedModel

from dagrl.backends.base import GenerationRequest, TrainEngine
from dagrl.config.residency import Residency
from dagrl.config.schema import SamplingSpec
from dagrl.weight_sync.manifest import Bucket
from dagrl.workers.weight_transfer import read_weights, write_weights

pytestmark = pytest.mark.slow

ModelOf = Callable[[int], PreTrainedModel]
TWELVE = LONG.model_copy(update={"max_new_tokens": 12})


def test_greedy_tokens_and_log_probs_are_the_models(engine, backend, requests, model_of: ModelOf) -> None:
    for request, completion in zip(requests, complete(engine, requests, GREEDY), strict=True):
        assert is_greedy(model_of(OLD), request, completion)
        assert deviation(model_of(OLD), request, completion).max() <= 1e-5
        assert completion.tokens.dtype == np.int64 and completion.logprobs.dtype == np.float32
        assert completion.policy_version == 0
        assert (completion.routed_experts is None) == (backend != "vllm"), "vLLM's server is asked for them here"
        stopped = completion.tokens[-1] in ENDS
        assert (completion.finish_reason == "stop") == stopped and (stopped or len(completion.tokens) == 16)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSpec(max_new_tokens=12, temperature=0.6),
        SamplingSpec(max_new_tokens=12, temperature=0.6, top_p=0.8, top_k=4),
        SamplingSpec(max_new_tokens=12, min_p=0.4),
    ],
    ids=["temperature", "top-p and top-k", "min-p"],
)
def test_sampled_tokens_and_their_log_probs(engine, backend, requests, model_of: ModelOf, sampling) -> None:
    """vLLM's log-probs are those after top-p, top-k and min-p, the others' those before them.

    SGLang applies top-p and top-k together, the others one after the other.
    """
    for request, completion in zip(requests, complete(engine, requests, sampling), strict=True):
        assert deviation(model_of(OLD), request, completion, sampling, cut=backend == "vllm").max() <= 1e-5
        expected = (log_probs_of(model_of(OLD), request, completion) / sampling.temperature).log_softmax(-1)
        assert kept(expected, sampling, together=backend == "sglang")[
            range(len(completion.tokens)), completion.tokens
        ].all()


def test_requests_of_one_call_may_be_sampled_differently(engine, requests, model_of: ModelOf) -> None:
    short = SamplingSpec(max_new_tokens=3, temperature=0, ignore_eos=True)
    hot = SamplingSpec(max_new_tokens=9, temperature=1.7, ignore_eos=True)
    mixed = [replace(each, sampling=(None, short, hot)[index % 3]) for index, each in enumerate(requests)]
    whole = complete(engine, requests, GREEDY)
    cut = complete(engine, requests, short)
    for index, completion in enumerate(complete(engine, mixed, GREEDY)):
        if index % 3 == 2:
            assert len(completion.tokens) == 9
            assert deviation(model_of(OLD), requests[index], completion, hot).max() <= 1e-5
            continue
        alone = (whole, cut)[index % 3][index]
        assert completion.tokens.tolist() == alone.tokens.tolist()
        assert completion.finish_reason == alone.finish_reason
        np.testing.assert_allclose(completion.logprobs, alone.logprobs, atol=1e-5)


def test_a_stop_string_ends_a_response_with_its_last_token(engine, requests, decode) -> None:
    """The same tokens and log-probs as without it, so that exactly what was sampled is trained on."""
    long = SamplingSpec(max_new_tokens=60, temperature=0)
    free = complete(engine, requests, long)
    stop = decode(free[4].tokens[3:5])
    for whole, completion in zip(
        free, complete(engine, requests, long.model_copy(update={"stop": (stop,)})), strict=True
    ):
        before, found, _ = decode(whole.tokens).partition(stop)
        assert decode(completion.tokens) == before + found
        assert completion.finish_reason == ("stop" if found else whole.finish_reason)
        np.testing.assert_allclose(completion.logprobs, whole.logprobs[: len(completion.tokens)], atol=1e-5)
        if completion.routed_experts is not None:
            assert len(completion.routed_experts) == len(requests[completion.index].prompt) + len(completion.tokens) - 1


def test_the_token_that_stops_a_response_is_part_of_it(engine, requests) -> None:
    free = complete(engine, requests, TWELVE)
    stop = int(free[4].tokens[3])
    stopping = SamplingSpec(max_new_tokens=12, temperature=0, stop_token_ids=(stop,))
    for whole, completion in zip(free, complete(engine, requests, stopping), strict=True):
        ends = [place for place, token in enumerate(whole.tokens) if token in (stop, *ENDS)]
        expected = whole.tokens[: ends[0] + 1] if ends else whole.tokens
        assert completion.tokens.tolist() == expected.tolist()
        assert completion.finish_reason == ("stop" if ends else "length")


def test_an_end_that_is_the_last_token_allowed_is_a_stop(engine, requests) -> None:
    free = SamplingSpec(max_new_tokens=12, temperature=0)
    stopping = free.model_copy(update={"stop_token_ids": (int(complete(engine, requests, free)[4].tokens[3]),)})
    ended = [each for each in complete(engine, requests, stopping) if each.finish_reason == "stop"]
    assert ended
    for each in ended:
        size = len(each.tokens)
        for request, sampling in (
            (requests[each.index], stopping.model_copy(update={"max_new_tokens": size})),
            (replace(requests[each.index], limit=size), stopping),
        ):
            (again,) = complete(engine, [request], sampling)
            assert (again.tokens.tolist(), again.finish_reason) == (each.tokens.tolist(), "stop")


def test_a_response_may_use_all_positions_and_continue_within_the_last(engine, model_of: ModelOf) -> None:
    prompt = np.random.default_rng(8).integers(3, 15, size=POSITIONS - 12)
    (whole,) = complete(engine, [GenerationRequest(prompt, 0)], TWELVE)
    assert (len(whole.tokens), whole.finish_reason) == (12, "length")
    assert deviation(model_of(OLD), GenerationRequest(prompt, 0), whole).max() <= 1e-5
    for there in (6, 11):
        begun = GenerationRequest(prompt, 0, whole.tokens[:there])
        (rest,) = complete(engine, [begun], TWELVE)
        assert rest.tokens.tolist() == whole.tokens[there:].tolist()


def test_a_response_continues_after_its_beginning(engine, requests) -> None:
    whole = complete(engine, requests, TWELVE)
    begun = [
        GenerationRequest(each.prompt, each.seed, done.tokens[:5]) for each, done in zip(requests, whole, strict=True)
    ]
    for all_, later in zip(whole, complete(engine, begun, TWELVE), strict=True):
        assert later.tokens.tolist() == all_.tokens[5:].tolist()
        np.testing.assert_allclose(later.logprobs, all_.logprobs[5:], atol=1e-5)


def test_a_response_that_continues_draws_other_random_numbers(engine, requests) -> None:
    hot = SamplingSpec(max_new_tokens=24, temperature=2.0, ignore_eos=True)
    short = [replace(each, limit=12) for each in requests]
    first = complete(engine, short, hot)
    begun = [replace(each, begun=done.tokens) for each, done in zip(short, first, strict=True)]
    later = complete(engine, begun, hot)
    alike = np.mean([one.tokens == other.tokens for one, other in zip(first, later, strict=True)])
    assert alike < 0.3, "with the same random numbers it would be 0.6"


def test_a_request_may_have_a_limit_of_its_own(engine, requests) -> None:
    free = complete(engine, requests, TWELVE)
    limited = [replace(request, limit=3 if number % 2 else None) for number, request in enumerate(requests)]
    for number, (whole, completion) in enumerate(zip(free, complete(engine, limited, TWELVE), strict=True)):
        most = 3 if number % 2 else len(whole.tokens)
        assert completion.tokens.tolist() == whole.tokens[:most].tolist()
        assert completion.finish_reason == ("length" if most < len(whole.tokens) else whole.finish_reason)


def test_calls_from_several_threads_share_the_engine(engine, requests) -> None:
    alone = [each.tokens.tolist() for each in complete(engine, requests, GREEDY)]
    found: dict[int, list[list[int]]] = {}

    def call(number: int) -> None:
        found[number] = [each.tokens.tolist() for each in complete(engine, requests, GREEDY)]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert found == dict.fromkeys(range(3), alone)


def test_later_samples_are_of_the_new_weights_and_version(engine, requests, model_of: ModelOf, weights_of) -> None:
    complete(engine, requests, GREEDY)  # fills the cache of the old weights
    engine.load_weights(iter([weights_of(NEW)]), 7)
    assert engine.policy_version == 7
    for request, completion in zip(requests, complete(engine, requests, GREEDY), strict=True):
        assert completion.policy_version == 7
        assert deviation(model_of(NEW), request, completion).max() <= 1e-5


def test_weights_come_from_a_folder_that_a_trainer_of_another_run_wrote(
    engine, requests, model, model_of: ModelOf, weights_of, tmp_path
) -> None:
    class Trainer:
        def export_weights(self, bucket_bytes: int) -> Iterator[Bucket]:
            yield weights_of(NEW)[:3]
            yield weights_of(NEW)[3:]

    write_weights(cast(TrainEngine, Trainer()), model, tmp_path / "actor", writes=True)
    read_weights(engine, tmp_path / "actor", 7)
    for request, completion in zip(requests, complete(engine, requests, GREEDY), strict=True):
        assert completion.policy_version == 7
        assert deviation(model_of(NEW), request, completion).max() <= 1e-5


def test_an_abort_is_only_for_what_is_running(engine, requests) -> None:
    engine.abort()
    assert "abort" not in {each.finish_reason for each in complete(engine, requests, GREEDY)}


def test_prompts_that_cannot_be_answered_are_refused(engine) -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty; a model needs at least one token"):
        engine.generate([GenerationRequest(np.array([3]), 0), GenerationRequest(np.array([], dtype=int), 0)], GREEDY)
    with pytest.raises(ValueError, match=r"500 tokens and max_new_tokens 16 do not fit into .* 512"):
        engine.generate([GenerationRequest(np.full(500, 4), 0)], GREEDY)


def test_no_prompts_give_no_responses(engine) -> None:
    assert complete(engine, [], GREEDY) == []


def test_an_engine_generates_the_same_after_a_sleep(engine, requests) -> None:
    before = [each.tokens.tolist() for each in complete(engine, requests, GREEDY)]
    for depth in (Residency.WEIGHTS, Residency.ASLEEP):
        assert engine.sleep(depth).freed_gib == 0
        engine.wake(Residency.WEIGHTS)
        engine.wake(Residency.AWAKE)
    assert [each.tokens.tolist() for each in complete(engine, requests, GREEDY)] == before
