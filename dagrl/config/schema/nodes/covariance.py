"""`covariance`: marks the tokens that an update holds back."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import NodeBase, OpContract, Scope
from dagrl.config.schema.section import Threshold


class CovarianceNode(NodeBase):
    """Marks the tokens that would reduce the entropy most in an update, for ``policy: clip_cov`` or ``kl_cov``.

    Log-prob (before the update) and advantage of these tokens are both far above the mean, or both far below. With
    `second_moment` it marks tokens whose log-prob has changed most since sampling, for ``policy: m2po``; with
    `top_entropy` all tokens of low entropy, so that ``policy: clip_cov`` trains the others.
    """

    op: Literal["covariance"]
    share: Annotated[float, Field(gt=0, le=1)] = 2.0e-4
    """Fraction of the step's tokens that are marked, at least one token."""
    between: tuple[FiniteFloat, FiniteFloat] | None = None
    """Draw them from all tokens whose product of the two deviations is between these bounds, as Clip-Cov does with 1.0
    and 5.0. Default: the tokens with the largest products, as in KL-Cov."""
    second_moment: Threshold | None = None
    """Mark instead the tokens with the largest squares of the log-ratio of trainer to generator, so that the mean over
    the others is at most this: M2PO, with 0.04. Only tokens whose log-prob has moved in the direction of their
    advantage count."""

    top_entropy: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Mark instead all tokens except the share with the highest entropies, 0.2 in the paper. Reads the column that a
    node `{op: logprob, statistics: [entropy]}` writes."""

    @property
    def marks(self) -> Literal["covariance", "second_moment", "top_entropy"]:
        """The quantity by which tokens are selected."""
        if self.second_moment is not None:
            return "second_moment"
        return "covariance" if self.top_entropy is None else "top_entropy"

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        reads: tuple[str, ...] = ("old_logprob", "advantage", "response_mask")
        if self.second_moment is not None:
            reads += ("rollout_logprob",)
        elif self.top_entropy is not None:
            reads = ("entropy", "response_mask")
        return OpContract(reads, ("clip_cov_mask",), Scope.BATCH, reads_if_written=("is_expert",))
