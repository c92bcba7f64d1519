"""`buffer`: keeps the groups of each step, and returns some of them to later steps (experience replay)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import NodeBase, OpContract, Scope
from dagrl.config.schema.section import Coefficient, Name, PositiveInt


class BufferNode(NodeBase):
    """Keeps sampled groups with their rewards in the run folder, and returns some of them to later steps.

    A step trains on its own groups and also on the returned ones. Rollouts, rewards and a filter work on the step's own
    groups; all other nodes on both, so that log-probs under trained weights and advantages are computed again.
    Validation has no buffer. docs/replay_buffer.md explains it.
    """

    op: Literal["buffer"]
    groups_per_step: PositiveInt
    """Groups that return to each step, beside ``data.prompts_per_step`` new ones; fewer while the buffer has fewer."""
    policy: Literal["uniform", "fifo", "prioritised", "best", "successes"] = "uniform"
    """Which groups return: any (``uniform``); those that returned least often, the oldest first (``fifo``); with a
    probability by `priority` (``prioritised``); of each prompt only the group with the highest mean (``best``); only
    groups of hard prompts with a right response (``successes``)."""
    metric: Name = "reward"
    """The column that ranks samples: one with a number for each."""
    priority: Literal["advantage", "reward"] = "advantage"
    """``prioritised`` only: the mean over a group of the absolute values less their mean, or of the values."""
    exponent: Coefficient = 1.0
    """``prioritised`` only: the probability is proportional to the priority to this power."""
    floor: Coefficient = 0.0
    """``prioritised`` only: lowest priority of a group; at 0, groups without priority never return."""
    right_above: FiniteFloat = 0.0
    """``successes`` only: responses with a value above this are right."""
    hard_below: Annotated[float, Field(gt=0, le=1)] = 0.5
    """``successes`` only: prompts with a smaller fraction of right responses are hard."""
    keep: Literal["varied", "all"] = "varied"
    """Which groups enter the buffer: ``varied`` leaves out those whose values are all the same, as their advantages
    within the group are 0."""
    capacity: PositiveInt | None = None
    """Samples in the buffer. If there are more, the oldest groups leave it, with ``prioritised`` the ones of the lowest
    priority. Default: only `capacity_gib`."""
    capacity_gib: Annotated[float, Field(gt=0)] = 8.0
    """Bound on the size of the samples' columns in GiB, before compression."""
    max_age: PositiveInt | None = None
    """Policy versions by which the oldest sample of a group may lag behind the trained weights; also for
    ``schedule.stale_samples``. Default: no bound."""
    max_uses: PositiveInt | None = None
    """How often a group returns. Default: no bound."""

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        # `dagrl.graph.buffering` adds the columns that pass through it.
        reads = ("group_id", "prompt_tokens", "policy_version", self.metric)
        optional = () if self.metric == "excluded" else ("excluded",)
        return OpContract(tuple(dict.fromkeys(reads)), ("is_replayed",), Scope.BATCH, reads_if_written=optional)
