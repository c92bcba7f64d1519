"""Options of on-policy distillation, in ``advantage`` and in the loss of ``update``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field

from dagrl.config.columns import HIDDEN_STATES
from dagrl.config.schema.section import Section, Threshold, Weight

SampledDivergence = Literal["k2", "k3", "abs", "k1+", "k3+", "abs+"]
"""Estimates from the sampled tokens alone: `dagrl.algorithms.kl`. ``k1`` alone has no gradient on average."""


CandidateDivergence = Literal["forward_kl", "reverse_kl", "mixed_kl", "jsd"]
"""Divergences of the distributions, at given token ids or whole:
`dagrl.algorithms.distillation.candidate_divergence`."""


@dataclass(frozen=True, slots=True)
class WholeDivergence:
    """A divergence of the policy's distributions p from a teacher's q, over the whole vocabulary.

    (1 - alpha) KL(q || p) + alpha KL(p || q); or, as a mixture, alpha KL(q || m) + (1 - alpha) KL(p || m) with
    m = (1 - alpha) p + alpha q, for alpha above 0 and below 1.
    """

    alpha: float
    is_mixture: bool
    hidden: str
    """Column with the teacher's ``hidden_states``; NaN where it has none."""


class AdvantageDistillationSpec(Section):
    """Add the teacher's log-prob of each token minus the student's to the token's advantage."""

    coef: Weight = 1.0
    """Weight of the difference."""
    discount: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Weight of the difference one token later: a token is also credited with the differences that follow it. 0 credits
    each token with its own difference."""
    early_weight: Weight = 0.0
    """How much more the first token of a response counts than the last: the factor of a token is 1 + this times the
    share of the response's absolute differences from it on. 0.5 in IW-OPD."""
    clamp: Threshold | None = None
    """Bound on the difference of a token, on both sides. Default: none."""


class LossDistillationSpec(Section):
    """A divergence from the teacher as a term of the loss."""

    divergence: SampledDivergence | CandidateDivergence = "k1+"
    """Schulman's estimates of KL(student || teacher) from the sampled tokens, or the distance of the log-probs. With
    ``+`` the estimate has the gradient of ``k2``, which is the divergence's gradient. ``k3`` is at most 10 for a token.
    Or a divergence of the distributions: ``forward_kl`` is KL(teacher || student), ``reverse_kl``
    KL(student || teacher), ``mixed_kl`` a mean of both, ``jsd`` the generalised Jensen-Shannon divergence."""
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """``mixed_kl`` and ``jsd`` only: 0 is ``forward_kl``, 1 ``reverse_kl``."""
    over: Literal["topk", "vocabulary"] = "topk"
    """These divergences: over the tokens in ``teacher_topk_ids``, or over the whole vocabulary, from the
    ``teacher_hidden_states`` that a node ``logprob`` with `hidden_states` writes."""
    outside: Literal["bucket", "renormalize", "ignore", "zero"] = "bucket"
    """``over: topk`` only: the probability of all other tokens is one further token (``bucket``), is
    divided among the given ones (``renormalize``) or is left out (``ignore``). ``zero``: left out, and penalised in
    ``reverse_kl`` as if the teacher gave each of them a log-prob of -100."""
    min_logprob: Annotated[float, Field(lt=0)] | None = None
    """``over: topk`` only: log-probs of both are at least this, -10 in verl. Default: no bound."""
    is_clip: Threshold | None = None
    """Multiply the divergence by the ratio of the token's probability to its probability under ``old_logprob``, at most
    this: 2 in SDPO. Without ``old_logprob`` the ratio is 1. Default: no factor."""
    coef: Weight = 1.0
    """Weight of the divergence, beside a policy loss of weight 1."""
    clamp: Threshold | None = None
    """Bound on the divergence of a token, on both sides; beyond it there is no gradient. Default: none."""

    @property
    def over_candidates(self) -> bool:
        """Whether it reads the teacher's log-probs of several tokens at each place, not those of the sampled tokens."""
        return self.divergence in get_args(CandidateDivergence) and self.over == "topk"

    @property
    def over_vocabulary(self) -> bool:
        return self.divergence in get_args(CandidateDivergence) and self.over == "vocabulary"

    @property
    def columns(self) -> tuple[str, ...]:
        """The teacher's columns."""
        if self.over_vocabulary:
            return (HIDDEN_STATES,)
        return ("teacher_topk_ids", "teacher_topk_logprob") if self.over_candidates else ("teacher_logprob",)

    @property
    def kl_share(self) -> float:
        """Weight of KL(student || teacher) in a mean with KL(teacher || student); the mixture's `alpha` for ``jsd``."""
        return {"forward_kl": 0.0, "reverse_kl": 1.0}.get(self.divergence, self.alpha)

    @property
    def whole_divergence(self) -> WholeDivergence | None:
        """The divergence for the engine to compute; None unless it is over the whole vocabulary."""
        if not self.over_vocabulary:
            return None
        return WholeDivergence(self.kl_share, self.divergence == "jsd" and 0 < self.kl_share < 1, HIDDEN_STATES)
