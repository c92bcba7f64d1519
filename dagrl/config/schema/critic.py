"""Nodes on engines with a value or a reward head: critics and reward models."""

from __future__ import annotations

from typing import Literal

from dagrl.config.schema.node_base import NodeBase, TrainingNode
from dagrl.config.schema.objective import Aggregation
from dagrl.config.schema.section import Coefficient, Name, PositiveInt


class ValuesNode(NodeBase):
    """A critic's values: what it expects of a response from each of its tokens on, for ``estimator: gae``."""

    op: Literal["values"]
    """Names this kind of node."""
    engine: Name
    """The critic: an engine with ``head: value``."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Packed tokens in one forward pass of a model replica."""


class CriticNode(TrainingNode):
    """Trains a critic towards the returns that ``estimator: gae`` writes."""

    op: Literal["critic"]
    """Names this kind of node."""
    engine: Name
    """The critic: an engine with ``head: value``, and a model of its own or a copy of the policy's start."""
    cliprange_value: Coefficient = 0.5
    """A value that has moved further than this from the one before the update is not drawn further away; 0 for no
    bound."""
    aggregation: Aggregation = "token-mean"
    """How token losses become one number, as in an update's ``loss``."""


class RewardModelNode(NodeBase):
    """Scores each response with a model that has a reward head."""

    op: Literal["reward_model"]
    """Names this kind of node."""
    engine: Name
    """An engine with ``head: reward``. A megatron engine scores the sampled tokens as they are; a hf engine the prompt
    and the response as a conversation, by the chat template of its own model."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Packed tokens in one forward pass of a model replica."""
