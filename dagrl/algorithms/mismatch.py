"""How far a generator's log-probs of its own samples are from the trainer's: metrics, in every update.

With the same weights on both sides the two differ by kernels and precision alone, and all of these are near 0, or near
1 where they are ratios. `docs/mismatch.md` says which names they have elsewhere.
"""

from __future__ import annotations

import torch

from dagrl.algorithms.kl import k3
from dagrl.algorithms.rows import RowReducer
from dagrl.data.tally import tally

_LARGEST_LOG = 20.0
"""Logs of ratios are kept within this before exp(), so that one absurd token does not turn a metric into infinity."""


def mismatch_metrics(trainer: torch.Tensor, rollout: torch.Tensor, rows: RowReducer) -> dict[str, torch.Tensor]:
    """Tallies over the active tokens, and over responses where a name speaks of perplexity or of a sequence.

    `trainer` and `rollout` are log-probs of the same tokens [T], drawn by the generator. With r = exp(trainer -
    rollout):

    - ``logprob_diff``: the absolute difference; ``prob_diff``: that of the probabilities;
    - ``kl``, ``kl_k3``: KL(rollout || trainer) by k1 and k3; ``kl_reverse``: KL(trainer || rollout), as the mean of
      r log r - (r - 1), which is unbiased for samples of the generator and never negative;
    - ``ratio``: r, whose mean is 1 if the two have the same support; ``chi2_token``: r**2 - 1, the variance of r;
      ``chi2_sequence``: the same of the product of r over a response;
    - ``rollout_ppl``, ``trainer_ppl``: exp(-mean log-prob) of a response; ``ppl_ratio``: the second over the first.
    """
    rollout, trainer = rollout.double(), trainer.double()
    difference = trainer - rollout
    log_ratio = difference.clamp(-_LARGEST_LOG, _LARGEST_LOG)
    ratio = log_ratio.exp()
    of_tokens = {
        "mismatch/logprob_diff": difference.abs(),
        "mismatch/prob_diff": (trainer.exp() - rollout.exp()).abs(),
        "mismatch/kl": -difference,
        "mismatch/kl_k3": k3(-log_ratio),
        "mismatch/kl_reverse": ratio * log_ratio - torch.expm1(log_ratio),
        "mismatch/ratio": ratio,
        "mismatch/chi2_token": ratio.square() - 1,
    }
    of_responses = {
        "mismatch/rollout_ppl": _exp(-rows.means(rollout)),
        "mismatch/trainer_ppl": _exp(-rows.means(trainer)),
        "mismatch/ppl_ratio": _exp(-rows.means(difference)),
        "mismatch/chi2_sequence": _exp(rows.sums(difference)).square() - 1,
    }
    return tally(of_tokens, rows.active) | tally(of_responses, rows.once)


def _exp(log_value: torch.Tensor) -> torch.Tensor:
    return log_value.clamp(-_LARGEST_LOG, _LARGEST_LOG).exp()
