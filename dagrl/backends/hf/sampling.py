"""How the next token is drawn: pure functions over rows of logits, used by `dagrl.backends.hf.decoding`.

The order is SGLang's: temperature, then top-k, then top-p among what top-k left, then min-p. A row's draw depends on
its own logits and its own uniform number alone, so that a row does not notice its neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dagrl.config.schema import SamplingSpec


def uniform_numbers(seeds: Sequence[int], steps: int) -> np.ndarray:
    """One number in [0, 1) for each row and decoding step, float64 [len(seeds), steps].

    Row i comes from a counter-based generator keyed by ``seeds[i]``, so it is the same in any batch, and its beginning
    the same for any number of steps. Seeds are 0 or more; ValueError otherwise.
    """
    numbers = np.empty((len(seeds), steps))
    for row, seed in enumerate(seeds):
        np.random.Generator(np.random.Philox(key=seed)).random(out=numbers[row])
    return numbers


def sample_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: SamplingSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for each row: tokens int64 [R], and their log-probs float32 [R].

    `logits` is [R, V], `uniforms` float64 [R]. The log-prob is that of ``logits / temperature`` before tokens are left
    out, as SGLang returns it; at temperature 0, which takes the likeliest token, that of the logits themselves.
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
    """`probabilities` [R, V] with those outside top-k, then top-p, then min-p, set to 0; what stays is not rescaled.

    Top-k keeps exactly k tokens (all where it is -1); of equal ones the lower ids. Top-p keeps the smallest set of the
    likeliest tokens that holds at least `top_p` of what top-k kept, and never less than one token. Min-p keeps tokens
    that are at least `min_p` times as likely as the likeliest.
    """
    limits_k = 0 < sampling.top_k < probabilities.shape[-1]
    if limits_k or sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        if limits_k:
            ordered[:, sampling.top_k :] = 0
        if sampling.top_p < 1:
            # float64, for over a large vocabulary float32 rounding would move the border.
            upto = ordered.cumsum(dim=-1, dtype=torch.float64)
            ordered[upto - ordered >= sampling.top_p * upto[:, -1:]] = 0
        probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
    if sampling.min_p > 0:
        least = sampling.min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0)
    return probabilities


def inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token of each row at which the running sum of `weights` [R, V] passes ``uniform * total``, int64 [R].

    Weights are 0 or more with a positive sum in each row; a token of weight 0 is never drawn.
    """
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    # For a uniform below 1 the product is below the total also after rounding, so that some token always passes it.
    return torch.searchsorted(running, uniforms.unsqueeze(-1) * running[:, -1:], right=True).squeeze(-1)
