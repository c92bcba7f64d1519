"""On-policy distillation: how a student learns from a teacher's log-probs of its own samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dagrl.config.schema.section import Section, Threshold, Weight

SampledDivergence = Literal["k2", "k3", "abs", "k1+", "k3+", "abs+"]
"""Estimates from the sampled tokens alone: `dagrl.algorithms.kl`. The mere ``k1`` has no gradient on average."""


class AdvantageDistillationSpec(Section):
    """Add the teacher's log-prob of each token minus the student's to the token's advantage."""

    coef: Weight = 1.0
    """Weight of the difference."""
    discount: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Weight of the difference one token later: a token is credited with those that follow it. 0 credits each token
    with its own."""
    clamp: Threshold | None = None
    """Bound on the difference of a token, on both sides. Default: none."""


class LossDistillationSpec(Section):
    """A divergence from the teacher as a term of the loss."""

    divergence: SampledDivergence = "k1+"
    """Schulman's estimates of KL(student || teacher) from the sampled tokens, or the mere distance of the log-probs.
    With ``+`` the value of one with the gradient of ``k2``, which is that of the divergence. ``k3`` is at most 10 for a
    token."""
    coef: Weight = 1.0
    """Weight of the divergence, beside a policy loss of weight 1."""
    clamp: Threshold | None = None
    """Bound on the divergence of a token, on both sides; beyond it there is no gradient. Default: none."""
