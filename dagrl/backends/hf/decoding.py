"""Autoregressive decoding of one batch with a KV cache.

`dagrl.backends.hf.engine` splits calls into batches; `dagrl.backends.hf.sampling` samples the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from dagrl.backends.base import Completion, GenerationRequest
from dagrl.backends.hf.sampling import sample_tokens, uniform_numbers
from dagrl.backends.hf.vision import adding, seen_inputs
from dagrl.backends.runtime.stop_strings import StopSearch, StopStrings
from dagrl.config.schema import SamplingSpec
from dagrl.model_files.images import ImageSettings

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel


# As a decorator it applies only while the generator runs, not between two responses.
@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    requests: Sequence[GenerationRequest],
    sampling: SamplingSpec,
    stop_token_ids: Sequence[int],
    policy_version: int,
    goes_on: Callable[[int], bool],
    vision: ImageSettings | None = None,
    stop_strings: StopStrings | None = None,
) -> Iterator[Completion]:
    """Decode one response per request, yielded as it ends; `index` is its index in `requests`. Prompts are not empty.

    `goes_on` is called after each step with the number of sampled tokens; if it returns False, the remaining responses
    are yielded as they are. `vision` is set for a vision model. Finished rows leave the batch at once. This copies the
    cache, which each step does anyway.
    """
    device = model.device
    begun = torch.tensor([len(request.begun) for request in requests], device=device)
    assert (begun < sampling.max_new_tokens).all(), "a complete response cannot be continued"
    most = [sampling.max_new_tokens if request.limit is None else request.limit for request in requests]
    ends = (begun + torch.tensor(most, device=device)).clamp(max=sampling.max_new_tokens)
    cache, logits, visible, positions = _prefill(model, requests, vision)
    seeds = [request.seed for request in requests]
    uniforms = torch.from_numpy(uniform_numbers(seeds, sampling.max_new_tokens)).to(device)
    stops = torch.tensor(stop_token_ids, dtype=torch.int64, device=device)
    tokens = torch.empty(uniforms.shape, dtype=torch.int64, device=device)
    logprobs = torch.empty(uniforms.shape, dtype=torch.float32, device=device)
    live = torch.arange(len(requests), device=device)
    searches = [StopSearch(stop_strings, request.begun[request.turn_start :]) for request in requests if stop_strings]
    # A partial response continues with the random numbers after those of its first tokens, and ends earlier.
    for step in range(sampling.max_new_tokens):
        picked, picked_logprobs = sample_tokens(logits, uniforms[live, begun[live] + step], sampling)
        tokens[live, step] = picked
        logprobs[live, step] = picked_logprobs
        told_to_end = not goes_on(len(live))
        stopped = torch.isin(picked, stops)
        if stop_strings is not None:
            ends_here = [searches[row].see([token]) for row, token in zip(live.tolist(), picked.tolist(), strict=True)]
            stopped |= torch.tensor(ends_here, device=device)
        full = ~stopped & (begun[live] + step + 1 == ends[live])
        ended = stopped | full
        if ended.any():
            for reason, those in (("stop", stopped), ("length", full)):
                yield from _completions(live[those], tokens, logprobs, step + 1, reason, policy_version)
            going = torch.nonzero(~ended).squeeze(-1)
            live, picked, positions = live[going], picked[going], positions[going]
            if not len(live):
                return
            cache.reorder_cache(going)
            visible = None if visible is None else visible[going]
        if told_to_end:
            yield from _completions(live, tokens, logprobs, step + 1, "abort", policy_version)
            return
        if visible is not None:
            visible = torch.nn.functional.pad(visible, (0, 1), value=True)
        here = positions.unsqueeze(-1)
        logits = _forward(model, visible, here.expand(3, -1, -1) if vision else here, cache, input_ids=picked[:, None])
        positions = positions + 1


def _prefill(
    model: PreTrainedModel, requests: Sequence[GenerationRequest], vision: ImageSettings | None
) -> tuple[DynamicCache, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The cache, the logits after each prompt [R, V], a mask of the cache positions with a token, bool [R, L], or None
    if all have one, and the position of the next token, int64 [R]. Equal prompts are computed once.
    """
    from transformers import DynamicCache

    places: dict[Hashable, int] = {}
    inverse = [places.setdefault(request.context_key, len(places)) for request in requests]
    distinct = [requests[inverse.index(place)] for place in range(len(places))]
    prompts = [np.concatenate([request.prompt, request.begun]).astype(np.int64) for request in distinct]
    longest = max(len(prompt) for prompt in prompts)
    # Padded on the left, so that all rows continue at the same position of the cache.
    ids = np.zeros((len(prompts), longest), dtype=np.int64)
    held = np.zeros((len(prompts), longest), dtype=bool)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        held[row, longest - len(prompt) :] = True

    device = model.device
    cache = DynamicCache(config=model.config)
    visible = None if held.all() else torch.from_numpy(held).to(device)
    tokens = torch.from_numpy(ids).to(device)
    if vision is None:
        positions = torch.from_numpy(np.maximum(np.cumsum(held, axis=1) - 1, 0)).to(device)
        logits = _forward(model, visible, positions, cache, input_ids=tokens)
    else:
        seen = seen_inputs(model, distinct, tokens, vision)
        positions = seen.positions
        with adding(model, seen.added):
            logits = _forward(model, visible, positions, cache, inputs_embeds=seen.embedded)
    # All positions of a text token are equal, and those of an image are smaller than the next token's.
    following = (positions if vision is None else positions.amax(0)).amax(-1) + 1
    if len(distinct) < len(requests):
        rows = torch.tensor(inverse, device=device)
        cache.reorder_cache(rows)
        logits, following = logits[rows], following[rows]
        visible = None if visible is None else visible[rows]
    return cache, logits, visible, following


def _forward(
    model: PreTrainedModel,
    visible: torch.Tensor | None,
    positions: torch.Tensor,
    cache: DynamicCache,
    **inputs: torch.Tensor,
) -> torch.Tensor:
    """Logits after the last of the tokens or embeddings `inputs` [R, L], as [R, V]; the cache grows by L."""
    output = model(
        attention_mask=visible,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **inputs,
    )
    return output.logits[:, -1]


def _completions(
    rows: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor, length: int, reason: str, policy_version: int
) -> Iterator[Completion]:
    ended_tokens = tokens[rows, :length].cpu().numpy()
    ended_logprobs = logprobs[rows, :length].cpu().numpy()
    for place, row in enumerate(rows.tolist()):
        yield Completion(row, ended_tokens[place], ended_logprobs[place], reason, policy_version)
