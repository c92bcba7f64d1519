"""`mix`: puts responses of the data set into sampled groups."""

from __future__ import annotations

from typing import Literal

from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import NodeBase, OpContract, Scope
from dagrl.config.schema.section import PositiveInt

_REPLACED = ("response_tokens", "response_mask", "rollout_logprob", "finish_reason")
"""Columns of a rollout that `mix` replaces."""


class MixNode(NodeBase):
    """Puts responses of the data set into the groups of a rollout, in place of each group's last responses.

    Later nodes, rewards too, see the mixed group; ``is_expert`` marks the expert's rows. Advantages compare the
    policy's rows only. ``loss.sft_coef`` of an update weighs the expert's rows. In validation nothing is mixed.
    """

    op: Literal["mix"]
    per_prompt: PositiveInt = 1
    """Responses of each group that are replaced by expert responses."""

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        reads = ("group_id", "demonstration", *_REPLACED)
        return OpContract(reads, (*_REPLACED, "is_expert"), Scope.GROUP, replaces=_REPLACED)
