"""Generation with images: log-probs are those of the whole sequence, whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
from seeing import DEEP, seeing_model, seeing_samples, settings_of

from dagrl.backends.backend import RankContext
from dagrl.backends.base import GenerationRequest
from dagrl.backends.runtime.vision import patches
from dagrl.config.schema import SamplingSpec
from dagrl.model_files.images import split_images

SAMPLING = SamplingSpec(max_new_tokens=6, temperature=0.7, ignore_eos=True)


@pytest.fixture(scope="module", params=[{}, DEEP], ids=["qwen2_5_vl", "qwen3_vl"])
def engine(request):
    from dagrl.backends.hf.engine import HfEngine
    from dagrl.backends.hf.section import HfEngineSpec

    spec = HfEngineSpec.model_validate({"backend": "hf", "group": "rollout"})
    return HfEngine(seeing_model(**request.param), spec, RankContext(0, 1, "127.0.0.1", 0, 60.0, 3))


def requests() -> list[GenerationRequest]:
    rows = seeing_samples()
    images = [split_images(rows["pixel_values"][row], rows["image_sizes"][row]) for row in range(8)]
    return [GenerationRequest(rows["prompt_tokens"][row], 10 + row, images=tuple(images[row])) for row in range(8)]


def sampled(engine, asked: list[GenerationRequest]) -> list:
    found = {each.index: each for each in engine.generate(asked, SAMPLING)}
    return [found[index] for index in range(len(asked))]


def test_a_batch_gives_what_each_prompt_gives_alone(engine) -> None:
    together = sampled(engine, requests())
    for request, completion in zip(requests(), together, strict=True):
        (alone,) = sampled(engine, [request])
        assert alone.tokens.tolist() == completion.tokens.tolist()
        assert np.abs(alone.logprobs - completion.logprobs).max() < 1e-5


def test_log_probs_are_those_of_the_library(engine) -> None:
    import torch

    for asked, found in zip(requests(), sampled(engine, requests()), strict=True):
        tokens = torch.tensor([[*asked.prompt, *found.tokens]])
        inputs = {}
        if asked.images:
            settings = settings_of(seeing_model())
            pixels, grids = patches(asked.images, settings, torch.device("cpu"), torch.float32)
            kinds = torch.zeros_like(tokens, dtype=torch.int)
            kinds[:, : len(asked.prompt)] = tokens[:, : len(asked.prompt)] == settings.token
            inputs = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}
        if (found.tokens == 60).any():
            continue  # The library would take it for a part of an image.
        with torch.inference_mode():
            logits = engine._model(input_ids=tokens, **inputs).logits[0, len(asked.prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(found.tokens)[:, None])[:, 0]
        assert np.abs(expected.numpy() - found.logprobs).max() < 1e-5


def test_a_partial_response_continues_after_the_image(engine) -> None:
    whole = sampled(engine, requests())
    begun = [
        GenerationRequest(each.prompt, each.seed, completion.tokens[:2], images=each.images)
        for each, completion in zip(requests(), whole, strict=True)
    ]
    for completion, rest in zip(whole, sampled(engine, begun), strict=True):
        assert rest.tokens.tolist() == completion.tokens[2:].tolist()
        assert np.abs(rest.logprobs - completion.logprobs[2:]).max() < 1e-5


def test_the_image_matters(engine) -> None:
    first = requests()[0]
    black = GenerationRequest(first.prompt, first.seed, images=(np.zeros_like(first.images[0]),))
    (seen,), (dark,) = sampled(engine, [first]), sampled(engine, [black])
    assert np.abs(seen.logprobs - dark.logprobs).max() > 1e-3


def test_tokens_that_do_not_fit_the_images_are_refused(engine) -> None:
    first = requests()[0]
    with pytest.raises(ValueError, match="has 5 tokens for images, which take 6"):
        sampled(engine, [GenerationRequest(np.delete(first.prompt, 3), 1, images=first.images)])
