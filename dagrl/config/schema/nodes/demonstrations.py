"""`sft` and `dpo`: train on responses of the data set."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dagrl.config.capability import Capability
from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import Aggregation, OpContract, Scope, TrainingNode
from dagrl.config.schema.section import Weight


class DemonstrationNode(TrainingNode):
    """Options of the nodes that train on demonstrations."""

    val_loss: bool = True
    """Also report the loss on ``data.val`` in each validation, if no node trains on samples: its files then need the
    columns of ``data.responses``."""

    @property
    def learns_from_data(self) -> bool:
        """Whether its demonstrations come from the data set, not from another node."""
        return self.read.get("demonstration", "demonstration").rpartition(".")[2] == "demonstration"


class SftNode(DemonstrationNode):
    """Trains an engine on the data set's responses: supervised fine-tuning."""

    op: Literal["sft"]
    aggregation: Aggregation = "token-mean"
    """How the losses of tokens become one number, as in an update's ``loss``."""

    @property
    def loss_is_sum_over_tokens(self) -> bool:
        return True

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        return OpContract(("prompt_tokens", "demonstration"), (), Scope.BATCH, needs=Capability.TRAIN)


class DpoNode(DemonstrationNode):
    """Trains an engine to prefer the first of a prompt's two responses: direct preference optimization."""

    op: Literal["dpo"]
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    """Weight of the divergence from the reference."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """``sigmoid`` is DPO's loss; ``ipo`` pulls the difference of log-ratios to 1 / (2 beta); ``hinge`` is 0 from a
    difference of 1 / beta on."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """``sigmoid`` only: assumed share of pairs with wrong labels (conservative DPO)."""
    sft_coef: Weight = 0.0
    """Weight of the likelihood of chosen responses, over their lengths, added to the loss."""

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        reads = ("group_id", "prompt_tokens", "demonstration", "ref_logprob")
        return OpContract(reads, (), Scope.BATCH, needs=Capability.TRAIN, whole_groups=True)
