"""Samples the next token: pure functions over rows of logits, used by `dagrl.backends.hf.decoding`.

The order is SGLang's: temperature, top-k, top-p of the remaining tokens, min-p. A row's draw depends only on its own
logits and random number, not on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dagrl.config.schema import SamplingSpec


def uniform_numbers(seeds: Sequence[int], steps: int) -> np.ndarray:
    """Random numbers in [0, 1) for each row and decoding step, float64 [len(seeds), steps].

    Row i is from a counter-based generator keyed by ``seeds[i]``, so it does not depend on the batch, and a prefix not
    on `steps`. Raises ValueError for negative seeds.
    """
    numbers = np.empty((len(seeds), steps))
    for row, seed in enumerate(seeds):
        np.random.Generator(np.random.Philox(key=seed)).random(out=numbers[row])
    return numbers


def sample_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: SamplingSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row: tokens int64 [R], and their log-probs float32 [R].

    `logits` is [R, V], `uniforms` float64 [R]. Log-probs are taken under ``logits / temperature`` before top-k, top-p
    and min-p; at temperature 0, which is greedy, under the logits.
    """
    scores = logits.float()
    if sampling.temperature == 0:
        tokens = scores.argmax(dim=-1)
        logprobs = scores.log_softmax(dim=-1)
    else:
        logprobs = (scores / sampling.temperature).log_softmax(dim=-1)
        tokens = inverse_cdf(restrict(logprobs.exp(), sampling), uniforms)
    return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def restrict(probabilities: torch.Tensor, sampling: SamplingSpec) -> torch.Tensor:
    """Set `probabilities` [R, V] outside of top-k, then top-p, then min-p to 0, without rescaling.

    Top-k keeps exactly k tokens (all if -1), lower ids first among equals; top-p the smallest set of the likeliest with
    at least `top_p` of the remaining probability; min-p those at least `min_p` times as likely as the likeliest.
    """
    limits_k = 0 < sampling.top_k < probabilities.shape[-1]
    if limits_k or sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        if limits_k:
            ordered[:, sampling.top_k :] = 0
        if sampling.top_p < 1:
            # float64, because float32 rounding over a large vocabulary would move the border.
            upto = ordered.cumsum(dim=-1, dtype=torch.float64)
            ordered[upto - ordered >= sampling.top_p * upto[:, -1:]] = 0
        probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
    if sampling.min_p > 0:
        least = sampling.min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0)
    return probabilities


def inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token of each row where the running sum of `weights` [R, V] passes ``uniform * total``, int64 [R].

    Weights are non-negative with a positive sum per row; a token of weight 0 is never drawn.
    """
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    # For a uniform below 1 the product is below the total also after rounding, so some token always passes it.
    return torch.searchsorted(running, uniforms.unsqueeze(-1) * running[:, -1:], right=True).squeeze(-1)
