"""Metrics of the difference between the generator's and the trainer's log-probs of the same samples.

With equal weights on both sides only kernels and precision differ: metrics are near 0, ratios near 1.
`docs/mismatch.md` lists the names that other frameworks use.
"""

from __future__ import annotations

import torch

from dagrl.algorithms.kl import LARGEST_LOG, k3
from dagrl.algorithms.rows import RowReducer
from dagrl.data.tally import tally


def mismatch_metrics(trainer: torch.Tensor, rollout: torch.Tensor, rows: RowReducer) -> dict[str, torch.Tensor]:
    """Tallies over active tokens; over responses for metrics of perplexities and sequences.

    `trainer` and `rollout` are log-probs of the same tokens [T], drawn by the generator. With r = exp(trainer -
    rollout):

    - ``logprob_diff``: the absolute difference; ``prob_diff``: that of the probabilities;
    - ``kl``, ``kl_k3``: KL(rollout || trainer) by k1 and k3; ``kl_reverse``: KL(trainer || rollout), as the mean of
      r log r - (r - 1), which is unbiased for samples of the generator and never negative;
    - ``ratio``: r, whose mean is 1 if both have the same support; ``chi2_token``: r**2 - 1, the variance of r;
      ``chi2_sequence``: the same of the product of r over a response;
    - ``rollout_ppl``, ``trainer_ppl``: exp(-mean log-prob) of a response; ``ppl_ratio``: the second over the first;
    - ``unknown_fraction``: tokens whose `rollout` is not finite. The others leave them out.
    """
    rollout, trainer = rollout.double(), trainer.double()
    unknown = ~rollout.isfinite()
    every, rows = rows.active, rows.among(~unknown)
    difference = trainer - rollout
    log_ratio = difference.clamp(-LARGEST_LOG, LARGEST_LOG)
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
    of_all = tally({"mismatch/unknown_fraction": unknown}, every)
    return of_all | tally(of_tokens, rows.active) | tally(of_responses, rows.once)


def _exp(log_value: torch.Tensor) -> torch.Tensor:
    return log_value.clamp(-LARGEST_LOG, LARGEST_LOG).exp()
