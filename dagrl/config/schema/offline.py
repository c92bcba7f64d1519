"""Nodes that train on responses of the data set: supervised fine-tuning, preferences, and experts among samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dagrl.config.schema.node_base import NodeBase, TrainingNode
from dagrl.config.schema.objective import Aggregation
from dagrl.config.schema.section import PositiveInt, Weight


class DemonstrationNode(TrainingNode):
    """What the nodes that train on demonstrations may say."""

    val_loss: bool = True
    """Tell the loss on ``data.val`` too, in each validation, where nothing is trained on samples: its files need the
    columns of ``data.responses`` then."""

    @property
    def learns_from_data(self) -> bool:
        """Whether its demonstrations are those of the data set, and not what another node writes."""
        return self.read.get("demonstration", "demonstration").rpartition(".")[2] == "demonstration"


class SftNode(DemonstrationNode):
    """Trains an engine to say what the data set's responses say: supervised fine-tuning."""

    op: Literal["sft"]
    """Names this kind of node."""
    aggregation: Aggregation = "token-mean"
    """How the losses of tokens become one number, as in an update's ``loss``."""


class DpoNode(DemonstrationNode):
    """Trains an engine to prefer the first of a prompt's two responses: direct preference optimization."""

    op: Literal["dpo"]
    """Names this kind of node."""
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    """How strongly the reference holds it back: weight of the divergence from it."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """``sigmoid`` is DPO's own; ``ipo`` draws the difference of log-ratios to 1 / (2 beta) and not further; ``hinge``
    is content with a difference of 1 / beta."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """``sigmoid`` only: share of the pairs whose labels may be wrong (conservative DPO)."""
    sft_coef: Weight = 0.0
    """Weight of the likelihood of chosen responses, over their lengths, added to the loss."""


class MixNode(NodeBase):
    """Puts responses of the data set into the groups of a rollout: the last of each group become an expert's.

    Nodes behind it, rewards too, see the group as it is then; ``is_expert`` says which rows are whose. Advantages are
    those of the policy's own rows, compared among themselves. What an update makes of the expert's is
    ``loss.sft_coef``. In validation there is nothing to mix.
    """

    op: Literal["mix"]
    """Names this kind of node."""
    per_prompt: PositiveInt = 1
    """Responses of each group that become the expert's."""
