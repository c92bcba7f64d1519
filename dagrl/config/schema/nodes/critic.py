"""`values` and `critic`: the expected returns of a critic, and its training."""

from __future__ import annotations

from typing import Literal

from dagrl.config.capability import Capability
from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import Aggregation, OpContract, PackingNode, Scope, TrainingNode
from dagrl.config.schema.section import Coefficient, Name


class ValuesNode(PackingNode):
    """A critic's values: the expected return from each token on, for ``estimator: gae``."""

    op: Literal["values"]
    engine: Name
    """The critic: an engine with ``head: value``."""

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        return OpContract(("prompt_tokens", "response_tokens"), ("value",), needs=Capability.SCORE)


class CriticNode(TrainingNode):
    """Trains a critic towards the returns that ``estimator: gae`` writes."""

    op: Literal["critic"]
    engine: Name
    """The critic: an engine with ``head: value``, with another model or with the policy's start weights."""
    cliprange_value: Coefficient = 0.5
    """Clip range: a value that differs from the one before the update by more than this gets no gradient that moves it
    further away; 0 disables clipping."""
    aggregation: Aggregation = "token-mean"
    """How token losses become one number, as in an update's ``loss``."""

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        reads = ("prompt_tokens", "response_tokens", "response_mask", "value", "return")
        shares = ("trajectory_share",)
        return OpContract(reads, (), Scope.BATCH, reads_if_written=shares, needs=Capability.TRAIN)
