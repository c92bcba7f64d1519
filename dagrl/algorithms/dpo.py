"""Direct preference optimization: makes the chosen response likelier relative to the rejected one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from dagrl.algorithms.losses import refusable
from dagrl.data.batch import Batch, Column
from dagrl.data.tally import tally

if TYPE_CHECKING:
    from dagrl.backends.base import ResponseTokens
    from dagrl.config.schema.nodes.distillation import WholeDivergence

PreferenceLoss = Literal["sigmoid", "ipo", "hinge"]


def preference_loss(
    difference: torch.Tensor, form: PreferenceLoss, *, beta: float, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Loss of each pair, of the shape of `difference`.

    With h = log(pi(chosen) / ref(chosen)) - log(pi(rejected) / ref(rejected)), the `difference` of log-ratios of whole
    responses:

    - ``sigmoid``: -(1 - e) log s(beta h) - e log s(-beta h), s the logistic function. Without `label_smoothing` e it is
      DPO (arXiv 2305.18290, eq. 7); with it conservative DPO, for labels with a fraction e of wrong ones (Mitchell
      2023, https://ericmitchell.ai/cdpo.pdf, eq. 3).
    - ``ipo``: (h - 1 / (2 beta))**2 (arXiv 2310.12036, eq. 17, where beta is called tau).
    - ``hinge``: max(0, 1 - beta h) (SLiC's loss on DPO's ratios: hinge-norm of arXiv 2309.06657).
    """
    match form:
        case "sigmoid":
            scaled = beta * difference
            return -(1 - label_smoothing) * logsigmoid(scaled) - label_smoothing * logsigmoid(-scaled)
        case "ipo":
            return (difference - 1 / (2 * beta)).square()
        case "hinge":
            return torch.relu(1 - beta * difference)


class DpoObjective:
    """A `preference_loss`, averaged over pairs; a `dagrl.backends.base.Objective`.

    The rows of a group are a pair, the chosen response first. `sft_coef` adds the length-normalized likelihood of the
    chosen response: DPO + NLL of arXiv 2404.19733, section 2.
    """

    columns: tuple[str, ...] = ("group_id", "ref_logprob")
    needs_entropy = False
    candidates: str | None = None
    whole_divergence: WholeDivergence | None = None
    temperature = 1.0

    def __init__(
        self, form: PreferenceLoss = "sigmoid", *, beta: float, label_smoothing: float = 0.0, sft_coef: float = 0.0
    ) -> None:
        self.form = form
        self.beta, self.label_smoothing, self.sft_coef = beta, label_smoothing, sft_coef

    def token_weights(self, batch: Batch) -> tuple[Column, tuple[float, ...]]:
        """1 for each token; the normalizer is the number of pairs."""
        groups = batch["group_id"].values
        pairs = len(groups) // 2
        assert len(groups) % 2 == 0 and (groups[::2] == groups[1::2]).all(), "the rows of a pair are consecutive"
        assert len(np.unique(groups)) == pairs, "a group is a pair"
        tokens = batch["response_tokens"]
        return Column(np.ones(len(tokens.values), dtype=np.float32), tokens.offsets), (float(pairs),)

    def token_loss(self) -> None:
        """The loss is over pairs."""

    def __call__(self, tokens: ResponseTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The micro-batch's share of the loss, and metrics as tallies over pairs.

        ``dpo/chosen_reward`` and ``dpo/rejected_reward`` are beta log(pi / ref) of whole responses, DPO's implicit
        rewards, ``dpo/margin`` is their difference, and ``dpo/accuracy`` the fraction of pairs in which it is positive.
        ``loss/sft`` is the negative log-likelihood that `sft_coef` weights, reported even if that is 0.
        """
        rows = len(tokens.columns["group_id"])
        ratio = _row_sums(tokens.logprob - tokens.columns["ref_logprob"], tokens.row, rows)
        likelihood = _row_sums(tokens.logprob, tokens.row, rows) / _row_sums(
            torch.ones_like(tokens.logprob), tokens.row, rows
        ).clamp(min=1)
        chosen, rejected = ratio[::2], ratio[1::2]
        loss = preference_loss(chosen - rejected, self.form, beta=self.beta, label_smoothing=self.label_smoothing)
        imitation = -likelihood[::2]
        metrics = {
            "loss/dpo": loss,
            "loss/sft": imitation,
            "dpo/chosen_reward": self.beta * chosen,
            "dpo/rejected_reward": self.beta * rejected,
            "dpo/margin": self.beta * (chosen - rejected),
            "dpo/accuracy": chosen > rejected,
        }
        pairs = tokens.totals[0]
        share = (loss + self.sft_coef * imitation).sum() / pairs
        return refusable(share, tokens.logprob), tally(metrics, torch.ones_like(loss, dtype=torch.bool))


def _row_sums(values: torch.Tensor, row: torch.Tensor, rows: int) -> torch.Tensor:
    """Sum of the tokens' `values` per row; in float64, so that the order of summation on a GPU does not matter."""
    return torch.zeros(rows, dtype=torch.float64, device=values.device).index_add(0, row, values.double())
