"""The nodes: one module per op with its options, and its contract: columns in and out, scope, needed capability."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.advantage import AdvantageNode
from dagrl.config.schema.nodes.base import NodeBase, OpContract
from dagrl.config.schema.nodes.buffer import BufferNode
from dagrl.config.schema.nodes.covariance import CovarianceNode
from dagrl.config.schema.nodes.critic import CriticNode, ValuesNode
from dagrl.config.schema.nodes.demonstrations import DpoNode, SftNode
from dagrl.config.schema.nodes.filter import FilterNode
from dagrl.config.schema.nodes.judge import JudgeNode
from dagrl.config.schema.nodes.logprob import LogprobNode
from dagrl.config.schema.nodes.merge import MergeNode
from dagrl.config.schema.nodes.mix import MixNode
from dagrl.config.schema.nodes.reward import RewardModelNode, RewardNode
from dagrl.config.schema.nodes.rollout import RolloutNode
from dagrl.config.schema.nodes.tell import TellNode
from dagrl.config.schema.nodes.update import UpdateNode
from dagrl.config.schema.section import OwnFunction


class CustomNode(NodeBase):
    """Your own op, ``module:function``, decorated with `dagrl.node`."""

    op: OwnFunction
    """``module:function``, looked for beside the pipeline file and on the Python path."""
    args: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of the function."""

    @property
    def user_function(self) -> tuple[tuple[str, ...], str]:
        return ("op",), self.op

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        assert declared is not None, f"{self.op} declares its columns"
        return declared


def _node_tag(value: object) -> str:
    op = value.get("op") if isinstance(value, dict) else getattr(value, "op", None)
    return "custom" if isinstance(op, str) and ":" in op else str(op)


NodeSpec = Annotated[
    Annotated[RolloutNode, Tag("rollout")]
    | Annotated[RewardNode, Tag("reward")]
    | Annotated[LogprobNode, Tag("logprob")]
    | Annotated[AdvantageNode, Tag("advantage")]
    | Annotated[UpdateNode, Tag("update")]
    | Annotated[ValuesNode, Tag("values")]
    | Annotated[CriticNode, Tag("critic")]
    | Annotated[RewardModelNode, Tag("reward_model")]
    | Annotated[JudgeNode, Tag("judge")]
    | Annotated[FilterNode, Tag("filter")]
    | Annotated[CovarianceNode, Tag("covariance")]
    | Annotated[SftNode, Tag("sft")]
    | Annotated[DpoNode, Tag("dpo")]
    | Annotated[MixNode, Tag("mix")]
    | Annotated[MergeNode, Tag("merge")]
    | Annotated[TellNode, Tag("tell")]
    | Annotated[BufferNode, Tag("buffer")]
    | Annotated[CustomNode, Tag("custom")],
    Discriminator(_node_tag),
]
