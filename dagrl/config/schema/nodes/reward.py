"""`reward` and `reward_model`: score responses with a function, or with a reward head."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dagrl.config.capability import Capability
from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import TURN_COLUMNS, NodeBase, OpContract, PackingNode, SelectiveNode
from dagrl.config.schema.section import Coefficient, Concurrency, Name, Reward, Section


class SourceReward(Section):
    """The reward of one source or validation set."""

    fn: str
    """``math``, ``exact``, ``code``, ``environment``, ``agent``, or your own as ``module:function``."""
    args: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of the function."""


class RewardNode(NodeBase):
    """Scores each response."""

    op: Literal["reward"]
    fn: str | None = None
    """``math``, ``exact``, ``code``, ``environment``, ``agent``, or your own as ``module:function``. Default: each
    source has its own, in `by_source`."""
    args: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of the function."""
    by_source: dict[Name, SourceReward] = Field(default_factory=dict)
    """Other functions for the responses to prompts of single sources or validation sets, by their names."""
    on_error: Literal["stop"] | Reward = "stop"
    """If the function raises: stop the run and name the sample, or give the sample this reward."""
    concurrency: Concurrency | None = None
    """Samples scored at once, each in a thread: useful for a function that waits for other services. Default: the
    function's ``dagrl.reward`` mark; for ``code`` the number of cores, otherwise one."""
    expected_s: Coefficient | None = None
    """Seconds per sample, for `dagrl plan` only, which divides them by `concurrency`. Default: measured figures for
    ``math`` and ``code``, almost nothing for others."""

    @model_validator(mode="after")
    def _check_function(self) -> RewardNode:
        if self.fn is None and not self.by_source:
            raise ValueError("names no function; add `fn`")
        return self

    @property
    def functions(self) -> dict[str | None, SourceReward]:
        """Source or validation set -> its function; None -> the function of all others."""
        usual = {} if self.fn is None else {None: SourceReward(fn=self.fn, args=self.args)}
        return usual | self.by_source

    def function_of(self, source: str) -> SourceReward | None:
        """The function of a source or validation set."""
        return self.functions.get(source, self.functions.get(None))

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        reads: tuple[str, ...] = ("prompt_tokens", "response_tokens", "answer", "data_source", "extra_info")
        used = {function.fn for function in self.functions.values()}
        optional = (*TURN_COLUMNS, "finish_reason", *(("agent_reward",) if used - {"environment"} else ()))
        needed = {"environment": "token_reward", "agent": "agent_reward"}
        reads += tuple(column for fn, column in needed.items() if fn in used)
        reads += ("data_set",) if self.by_source else ()
        return OpContract(reads, self._writes(), reads_if_written=tuple(each for each in optional if each not in reads))

    def _writes(self) -> tuple[str, ...]:
        """A function of the user's own may return further numbers, which `samples` shows beside ``reward``."""
        own = any(":" in function.fn for function in self.functions.values())
        shown = own and not isinstance(self.write, str) and self.written_as("reward") == "reward"
        return ("reward", "reward_info") if shown else ("reward",)


class RewardModelNode(SelectiveNode, PackingNode):
    """Scores each response with a model that has a reward head."""

    op: Literal["reward_model"]
    engine: Name
    """An engine with ``head: reward``. It scores the sampled tokens or, with ``backend: hf``, prompt and response as a
    conversation, with the chat template of the engine's model."""

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        prompt = "messages" if engine is not None and engine.reads_messages else "prompt_tokens"
        reads = dict.fromkeys((prompt, "response_tokens", *self.chosen_by(declared)))
        return OpContract(tuple(reads), ("reward",), needs=Capability.JUDGE)
