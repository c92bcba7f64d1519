import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import dagrl.backends.hf.decoding as decoding
from dagrl.backends.base import Completion, GenerationRequest
from dagrl.backends.hf.engine import HfEngine
from dagrl.backends.runtime.initial_weights import weight_source
from dagrl.config.schema import ModelSpec, SamplingSpec

Build = Callable[..., HfEngine]
Complete = Callable[..., list[Completion]]

EOS = 1
PROMPTS = [[3, 13, 5, 14], [7], [4, 4, 13, 9, 9, 14], [3, 13, 5, 14], [8, 14]]
GREEDY = SamplingSpec(temperature=0.0, max_new_tokens=12)
WARM = SamplingSpec(temperature=1.5, max_new_tokens=12)


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens.tolist() for completion in completions]


def test_greedy_decoding_equals_transformers(
    model: ModelSpec, build_engine: Build, complete: Complete, reference: PreTrainedModel
) -> None:
    completions = complete(build_engine(model), PROMPTS, GREEDY)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=EOS,
            pad_token_id=0,
        )[0, len(prompt) :]
        assert completion.tokens.tolist() == expected.tolist()


def test_log_probs_equal_those_of_a_full_forward(
    model: ModelSpec, build_engine: Build, complete: Complete, reference: PreTrainedModel
) -> None:
    for completion, prompt in zip(complete(build_engine(model), PROMPTS, WARM), PROMPTS, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *completion.tokens]])).logits[0]
        logprobs = (logits / WARM.temperature).log_softmax(-1)[len(prompt) - 1 : -1]
        expected = logprobs.gather(-1, torch.from_numpy(completion.tokens)[:, None])[:, 0]
        assert np.abs(completion.logprobs - expected.numpy()).max() <= 1e-5


def test_first_and_second_tokens_follow_the_models_distribution(
    model: ModelSpec, build_engine: Build, complete: Complete, reference: PreTrainedModel
) -> None:
    draws = 8000
    sampling = SamplingSpec(temperature=2.0, max_new_tokens=2, ignore_eos=True)
    completions = complete(build_engine(model, max_batch_size=draws), [PROMPTS[0]] * draws, sampling)
    tokens = np.stack([completion.tokens for completion in completions])
    first = np.bincount(tokens[:, 0]).argmax()
    second_tokens = tokens[tokens[:, 0] == first, 1]
    for prefix, drawn in ((PROMPTS[0], tokens[:, 0]), ([*PROMPTS[0], first], second_tokens)):
        with torch.no_grad():
            logits = reference(torch.tensor([prefix])).logits[0, -1]
        expected = len(drawn) * (logits / 2.0).double().softmax(-1).numpy()
        counts = np.bincount(drawn, minlength=len(expected))
        # 0.999 quantile of chi-square with 14 degrees of freedom: the vocabulary holds 15 tokens.
        assert ((counts - expected) ** 2 / expected).sum() < 36.12


def test_batch_mates_do_not_change_a_rows_tokens(model: ModelSpec, build_engine: Build, complete: Complete) -> None:
    engine = build_engine(model)
    seeds = [90 + row for row in range(len(PROMPTS))]
    together = complete(engine, PROMPTS, WARM, seeds)
    for row, prompt in enumerate(PROMPTS):
        (alone,) = complete(engine, [prompt], WARM, [seeds[row]])
        assert alone.tokens.tolist() == together[row].tokens.tolist()
        assert np.abs(alone.logprobs - together[row].logprobs).max() <= 1e-5


@pytest.mark.parametrize("max_batch_size", [1, 2, 3, 7])
def test_small_batches_give_the_same_responses(
    model: ModelSpec, build_engine: Build, complete: Complete, max_batch_size: int
) -> None:
    prompts = PROMPTS * 3
    whole = complete(build_engine(model), prompts, WARM)
    split = complete(build_engine(model, max_batch_size=max_batch_size), prompts, WARM)
    assert tokens_of(split) == tokens_of(whole)


def test_no_more_rows_than_allowed_are_decoded_at_once(
    model: ModelSpec, build_engine: Build, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = forward_shapes(monkeypatch)
    complete(build_engine(model, max_batch_size=4), PROMPTS * 2, WARM)
    assert max(rows for rows, _ in shapes) == 4


def test_equal_prompts_are_prefilled_once_and_ended_rows_leave_the_batch(
    model: ModelSpec, build_engine: Build, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = forward_shapes(monkeypatch)
    completions = complete(build_engine(model), [PROMPTS[0]] * 20 + [PROMPTS[4]] * 20, WARM)
    lengths = Counter(len(completion.tokens) for completion in completions)
    assert len(lengths) > 3, "rows must end at different steps for this test to say anything"
    going = [sum(rows for length, rows in lengths.items() if length > step) for step in range(max(lengths))]
    assert shapes == [(2, 4), *((rows, 1) for rows in going[1:])]


def forward_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    shapes: list[tuple[int, int]] = []
    forward = decoding._forward

    def counting(*arguments: object, input_ids: torch.Tensor) -> torch.Tensor:
        shapes.append((input_ids.shape[0], input_ids.shape[1]))
        return forward(*arguments, input_ids=input_ids)

    monkeypatch.setattr(decoding, "_forward", counting)
    return shapes


def test_the_same_seeds_repeat_and_others_differ(model: ModelSpec, build_engine: Build, complete: Complete) -> None:
    engine = build_engine(model)
    prompts = [PROMPTS[2]] * 16
    first = complete(engine, prompts, WARM, range(16))
    torch.manual_seed(123)
    assert tokens_of(complete(engine, prompts, WARM, range(16))) == tokens_of(first)
    assert tokens_of(complete(engine, prompts, WARM, range(16, 32))) != tokens_of(first)
    assert len({tuple(tokens) for tokens in tokens_of(first)}) > 8


def test_a_response_ends_with_the_token_that_stops_it(
    model: ModelSpec, build_engine: Build, complete: Complete
) -> None:
    sampling = SamplingSpec(temperature=1.5, max_new_tokens=12, stop_token_ids=(4, 9))
    completions = complete(build_engine(model), PROMPTS * 8, sampling)
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        tokens = completion.tokens.tolist()
        assert not {EOS, 4, 9} & set(tokens[:-1])
        assert len(completion.logprobs) == len(tokens)
        if completion.finish_reason == "stop":
            assert tokens[-1] in {EOS, 4, 9}
        else:
            assert len(tokens) == 12
            assert tokens[-1] not in {EOS, 4, 9}
    assert {completion.tokens[-1] for completion in completions if completion.finish_reason == "stop"} == {EOS, 4, 9}


def test_all_end_tokens_of_the_folder_end_a_response(
    model: ModelSpec, build_engine: Build, complete: Complete, reference: PreTrainedModel, tmp_path: Path
) -> None:
    reference.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 9]}))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 4}))
    engine = build_engine(ModelSpec(path=tmp_path, tokenizer=model.tokenizer))
    completions = complete(engine, PROMPTS * 8, WARM)
    assert all(not {EOS, 4, 9} & set(completion.tokens[:-1].tolist()) for completion in completions)
    assert {completion.tokens[-1] for completion in completions if completion.finish_reason == "stop"} == {EOS, 4, 9}
    ignored = complete(engine, PROMPTS, WARM.model_copy(update={"ignore_eos": True}))
    assert {len(completion.tokens) for completion in ignored} == {12}


def test_end_of_sequence_on_the_last_allowed_token_is_a_stop(
    model: ModelSpec, build_engine: Build, complete: Complete
) -> None:
    completions = complete(build_engine(model), [PROMPTS[0]] * 200, SamplingSpec(temperature=9.0, max_new_tokens=1))
    reasons = {bool(completion.tokens[0] == EOS): completion.finish_reason for completion in completions}
    assert reasons == {True: "stop", False: "length"}


def test_ignore_eos_continues_to_the_full_length(model: ModelSpec, build_engine: Build, complete: Complete) -> None:
    sampling = SamplingSpec(temperature=1.5, max_new_tokens=12, ignore_eos=True)
    completions = complete(build_engine(model), PROMPTS * 4, sampling)
    assert {len(completion.tokens) for completion in completions} == {12}
    assert {completion.finish_reason for completion in completions} == {"length"}
    assert any(EOS in completion.tokens[:-1] for completion in completions)


def test_new_weights_change_what_is_drawn_and_are_counted_by_version(
    model: ModelSpec, build_engine: Build, complete: Complete
) -> None:
    engine = build_engine(model)
    before = tokens_of(complete(engine, PROMPTS, WARM))
    assert engine.policy_version == 0
    start, other = (named_weights(model, seed) for seed in (11, 12))
    engine.load_weights(iter([other[:5], other[5:], []]), version=7)
    assert engine.policy_version == 7
    assert tokens_of(complete(engine, PROMPTS, WARM)) != before
    engine.load_weights(iter([start]), version=8)
    assert tokens_of(complete(engine, PROMPTS, WARM)) == before


def test_refused_weights_leave_the_engine_as_it_was(model: ModelSpec, build_engine: Build, complete: Complete) -> None:
    engine = build_engine(model)
    before = tokens_of(complete(engine, PROMPTS, WARM))
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        engine.load_weights(iter([[item for item in named_weights(model, 12) if item[0] != "lm_head.weight"]]), 1)
    assert engine.policy_version == 0
    assert tokens_of(complete(engine, PROMPTS, WARM)) == before


def test_an_engine_that_follows_waits_for_its_first_weights(
    model: ModelSpec, build_engine: Build, complete: Complete
) -> None:
    engine = build_engine(model, weights_from="actor")
    with pytest.raises(AssertionError, match="before the first load_weights"):
        complete(engine, PROMPTS, WARM)
    engine.load_weights(iter([named_weights(model, 11)]), version=3)
    assert tokens_of(complete(engine, PROMPTS, WARM)) == tokens_of(complete(build_engine(model), PROMPTS, WARM))


def named_weights(model: ModelSpec, seed: int) -> list[tuple[str, torch.Tensor]]:
    source = weight_source(model, seed)
    return [(name, source.get(name)) for name in source.names()]


def test_a_model_folder_is_used_unchanged(
    model: ModelSpec, build_engine: Build, complete: Complete, reference: PreTrainedModel, tmp_path: Path
) -> None:
    reference.save_pretrained(tmp_path)
    from_folder = build_engine(ModelSpec(path=tmp_path, tokenizer=model.tokenizer))
    assert tokens_of(complete(from_folder, PROMPTS, WARM)) == tokens_of(complete(build_engine(model), PROMPTS, WARM))


@pytest.mark.parametrize(
    ("prompts", "max_new_tokens", "message"),
    [
        ([[3], []], 4, "prompt 1 is empty"),
        ([[3], [3] * 60], 5, "a prompt of 60 tokens and max_new_tokens 5 do not fit into the model's 64 positions"),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused(
    model: ModelSpec,
    build_engine: Build,
    complete: Complete,
    prompts: list[list[int]],
    max_new_tokens: int,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        complete(build_engine(model), prompts, SamplingSpec(max_new_tokens=max_new_tokens))


def test_no_prompts_give_no_responses(model: ModelSpec, build_engine: Build, complete: Complete) -> None:
    assert complete(build_engine(model), [], WARM) == []


def test_building_an_engine_leaves_the_random_stream_alone(model: ModelSpec, build_engine: Build) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_engine(model)
    assert torch.equal(torch.rand(3), expected)


def requests_of(prompts: list[list[int]], begun: list[list[int]] | None = None) -> list[GenerationRequest]:
    begun = begun or [[] for _ in prompts]
    return [
        GenerationRequest(np.array(prompt), seed, np.array(tokens, dtype=np.int64))
        for seed, (prompt, tokens) in enumerate(zip(prompts, begun, strict=True))
    ]


def test_an_interrupted_response_continues_with_the_same_tokens(
    model: ModelSpec, build_engine: Build, complete: Complete
) -> None:
    engine = build_engine(model, max_batch_size=3)
    whole = complete(engine, PROMPTS, WARM)
    # Of each response another number of tokens, and never all of them.
    parts = [min(row + 1, len(each.tokens) - 1) for row, each in enumerate(whole)]
    begun = [each.tokens[:part].tolist() for part, each in zip(parts, whole, strict=True)]
    assert len(set(parts)) > 2
    for rest in engine.generate(requests_of(PROMPTS, begun), WARM):
        expected, part = whole[rest.index], parts[rest.index]
        assert rest.tokens.tolist() == expected.tokens[part:].tolist()
        assert rest.finish_reason == expected.finish_reason
        assert np.abs(rest.logprobs - expected.logprobs[part:]).max() <= 1e-5


def test_an_abort_ends_what_is_decoded_and_what_waits(
    model: ModelSpec, build_engine: Build, complete: Complete
) -> None:
    engine = build_engine(model, max_batch_size=2)
    long = SamplingSpec(temperature=1.5, max_new_tokens=12, ignore_eos=True)
    whole = complete(engine, PROMPTS, long)
    before = engine.sampled_tokens
    assert before == 12 * len(PROMPTS)
    call = engine.generate(requests_of(PROMPTS), long)
    waiting = engine.generate(requests_of(PROMPTS[:1]), long)
    done = [next(call), next(call)]
    engine.abort()
    done += list(call)
    assert sorted(each.index for each in done) == list(range(len(PROMPTS)))
    assert [each.finish_reason for each in sorted(done, key=lambda each: each.index)] == ["length"] * 2 + ["abort"] * 3
    assert [(each.finish_reason, len(each.tokens)) for each in waiting] == [("abort", 0)]
    assert engine.sampled_tokens == before + 24
    assert tokens_of(complete(engine, PROMPTS, long)) == tokens_of(whole), "an abort is over once its calls are"


def test_an_abort_in_the_middle_leaves_what_there_is(
    model: ModelSpec, build_engine: Build, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(model)
    long = SamplingSpec(temperature=1.5, max_new_tokens=12, ignore_eos=True)
    whole = complete(engine, PROMPTS, long)
    forward, steps = decoding._forward, []

    def aborting(*arguments: object, **inputs: object) -> torch.Tensor:
        steps.append(1)
        if len(steps) == 5:
            engine.abort()
        return forward(*arguments, **inputs)

    monkeypatch.setattr(decoding, "_forward", aborting)
    for part in engine.generate(requests_of(PROMPTS), long):
        assert part.finish_reason == "abort"
        assert part.tokens.tolist() == whole[part.index].tokens[:5].tolist()
        assert len(part.logprobs) == 5


def test_calls_from_several_threads_draw_what_they_would_alone(
    model: ModelSpec, build_engine: Build, complete: Complete
) -> None:
    engine = build_engine(model, max_batch_size=2)
    alone = tokens_of(complete(engine, PROMPTS, WARM))
    said: dict[int, list[list[int]]] = {}

    def call(number: int) -> None:
        said[number] = tokens_of(complete(engine, PROMPTS, WARM))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert said == dict.fromkeys(range(4), alone)
