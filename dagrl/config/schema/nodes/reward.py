"""`reward`: scores responses with a function."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import TURN_COLUMNS, NodeBase, OpContract
from dagrl.config.schema.section import Coefficient, Concurrency, Reward


class RewardNode(NodeBase):
    """Scores each response."""

    op: Literal["reward"]
    fn: str
    """``math``, ``exact``, ``code``, ``environment``, ``agent``, or your own as ``module:function``."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function."""
    on_error: Literal["stop"] | Reward = "stop"
    """When the function raises: stop the run and name the sample, or give the sample this reward."""
    concurrency: Concurrency | None = None
    """Samples scored at once, each in a thread: useful if the function waits for others. Default: as the function is
    marked; for ``code`` the number of cores, otherwise one."""
    expected_s: Coefficient | None = None
    """Seconds per sample, for `dagrl plan` only, which divides them by `concurrency`. Default: measured figures for
    ``math`` and ``code``, almost nothing for others."""

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        reads = ("prompt_tokens", "response_tokens", "answer", "data_source", "extra_info")
        if self.fn == "environment":
            return OpContract((*reads, "token_reward"), ("reward",), reads_if_written=("token_turn", "finish_reason"))
        if self.fn == "agent":
            return OpContract((*reads, "agent_reward"), ("reward",), reads_if_written=(*TURN_COLUMNS, "finish_reason"))
        return OpContract(reads, self._writes(), reads_if_written=(*TURN_COLUMNS, "finish_reason", "agent_reward"))

    def _writes(self) -> tuple[str, ...]:
        """A function of the user's own may return further numbers, which `samples` shows beside ``reward``."""
        shown = ":" in self.fn and not isinstance(self.write, str) and self.written_as("reward") == "reward"
        return ("reward", "reward_info") if shown else ("reward",)
