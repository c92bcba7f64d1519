"""`reward_model`: scores responses with a reward head."""

from __future__ import annotations

from typing import Literal

from dagrl.config.capability import Capability
from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import OpContract, PackingNode
from dagrl.config.schema.section import Name


class RewardModelNode(PackingNode):
    """Scores each response with a model that has a reward head."""

    op: Literal["reward_model"]
    engine: Name
    """An engine with ``head: reward``. It scores the sampled tokens as they are, or, if its backend reads messages
    (``hf``), prompt and response as a conversation with the chat template of its own model."""

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        prompt = "messages" if engine is not None and engine.reads_messages else "prompt_tokens"
        return OpContract((prompt, "response_tokens"), ("reward",), needs=Capability.JUDGE)
