"""What is taken off a reward before responses are compared. On the host, in float64 numpy, by the advantage node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dagrl.data.batch import Column

if TYPE_CHECKING:
    from dagrl.algorithms.kl import KlEstimator


def kl_charges(
    policy_logprob: Column, ref_logprob: Column, mask: Column, *, coef: float, estimator: KlEstimator
) -> Column:
    """What each token is charged for its divergence from the reference: coef * log(policy / ref).

    That is eq. 2 of Ziegler et al. 2019 (arXiv 1909.08593) with `estimator` in place of the log-ratio, which is k1.
    PPO and REINFORCE++ charge each token its own term; estimators with one reward for a whole response charge it the
    sum, before groups are compared.

    Args:
        policy_logprob: ragged, log-probs of the response tokens under the policy that is trained, before the update.
        ref_logprob: the same under the reference.
        mask: ragged, 0 where a token is not charged.
        coef: weight of the penalty.
        estimator: see `kl_estimate`.

    Returns:
        float64, ragged as `mask`.

    """
    # The host's worker does without torch where nothing is charged.
    import torch

    from dagrl.algorithms.kl import kl_estimate

    policy = torch.from_numpy(policy_logprob.values.astype(np.float64))
    reference = torch.from_numpy(ref_logprob.values.astype(np.float64))
    divergence = kl_estimate(policy, reference, estimator).numpy()
    return Column(np.where(mask.values > 0, coef * divergence, 0.0), mask.offsets)


def overlong_penalty(lengths: np.ndarray, *, longest: int, buffer: int, factor: float) -> np.ndarray:
    """What is added to the rewards of responses that come near the longest: 0 or less.

    Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13), times `factor`: 0 up to longest - buffer tokens, then
    falling in a straight line to -1 at the longest, and -1 beyond.

    Args:
        lengths: [S], tokens of each response.
        longest: L_max, the longest response that is asked for.
        buffer: L_cache, the last tokens before it, at least 1.
        factor: the penalty of a response of the longest length.

    Returns:
        float64 [S].

    """
    return factor * np.clip((longest - buffer - np.asarray(lengths, dtype=np.float64)) / buffer, -1.0, 0.0)
