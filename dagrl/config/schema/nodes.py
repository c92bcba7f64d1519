"""Nodes: the stages of a step."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from dagrl.config.schema.covariance import CovarianceNode
from dagrl.config.schema.critic import CriticNode, RewardModelNode, ValuesNode
from dagrl.config.schema.filter import FilterNode
from dagrl.config.schema.judge import JudgeNode
from dagrl.config.schema.node_base import NodeBase, TrainingNode
from dagrl.config.schema.objective import (
    CosineRewardSpec,
    KlInRewardSpec,
    LengthRewardSpec,
    LossSpec,
    OverlongBufferSpec,
    RolloutCorrectionSpec,
)
from dagrl.config.schema.offline import DpoNode, MixNode, SftNode
from dagrl.config.schema.sampling import SamplingSpec
from dagrl.config.schema.section import (
    Coefficient,
    Concurrency,
    Name,
    OwnFunction,
    PositiveInt,
    Responses,
    Reward,
    Threshold,
    Tokens,
)
from dagrl.config.schema.turns import TurnOptions


class RolloutNode(NodeBase, TurnOptions):
    """Samples `n` responses to each prompt."""

    op: Literal["rollout"]
    """Names this kind of node."""
    engine: Name
    """The engine that generates."""
    n: Responses = 1
    """Responses for each prompt; together they are a group. A rollout behind another one answers each row once."""
    sampling: SamplingSpec
    """How tokens are drawn in training."""
    val_sampling: SamplingSpec | None = None
    """How they are drawn in validation. Default: as in training, with temperature 0."""
    val_n: Responses = 1
    """Responses for each prompt in validation; several need a `val_sampling` with a temperature."""
    over_sampling_batch_size: PositiveInt | None = None
    """Prompts that a training step begins, more than it needs: the first ``data.prompts_per_step`` whose responses are
    complete make the step, the slowest are aborted. Default: no more than it needs."""
    partial_rollout: bool = False
    """Aborted prompts come first in the next step, and their responses go on where they were. Default: they are given
    up, and come again in the next epoch."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Train on no tokens that older weights have sampled: their ``response_mask`` is 0."""
    partial_rollout_max_age: PositiveInt = 4
    """Policy versions that begun tokens may be behind: where there are older ones, the response begins anew."""
    max_prompt_tokens: Tokens | None = None
    """Longest prompt where a node of the pipeline makes the prompts: it has to see to that, a longer one ends the run.
    Default: ``data.max_prompt_tokens``."""

    def prompts_begun(self, prompts_per_step: int) -> int:
        """Prompts that a training step begins."""
        return self.over_sampling_batch_size or prompts_per_step


class RewardNode(NodeBase):
    """Scores each response."""

    op: Literal["reward"]
    """Names this kind of node."""
    fn: str
    """``math``, ``exact``, ``code``, or your own as ``module:function``."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function."""
    on_error: Literal["stop"] | Reward = "stop"
    """When the function raises: stop the run and name the sample, or give the sample this reward."""
    concurrency: Concurrency | None = None
    """Samples scored at once, each in a thread of its own: more than one where the function waits for others. Default:
    what the function is marked for; for ``code`` the number of cores, for the others one."""
    expected_s: Coefficient | None = None
    """Seconds that a sample takes, for `dagrl plan` alone, which divides them by `concurrency`. Default: what ``math``
    and ``code`` took elsewhere; next to nothing for others."""


class LogprobNode(NodeBase):
    """Log-probs of the sampled tokens under an engine's current weights.

    Left out of the run where nobody but an update of the same engine reads it, as ``old_logprob``, and the update takes
    one optimizer step for each batch: the ratio is 1 then.
    """

    op: Literal["logprob"]
    """Names this kind of node."""
    engine: Name
    """The engine that computes."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Packed tokens in one forward pass of a model replica."""


Estimator = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gae",
    "remax",
    "opmd",
    "gpg",
]


PackingNode = LogprobNode | ValuesNode | RewardModelNode | TrainingNode
"""Nodes that take whole samples through a model, packed into micro-batches of so many tokens."""


class AdvantageNode(NodeBase):
    """Turns rewards into advantages."""

    op: Literal["advantage"]
    """Names this kind of node."""
    estimator: Estimator | OwnFunction
    """How. The first four compare within a prompt's group: by mean and deviation, by mean alone, with the mean of the
    others, with the mean weighted by length. The next two are whitened over the whole step, as rewards or as deviations
    from their group's mean. ``gae`` compares with what a critic expects, token by token, whitened too, and writes the
    critic's targets, ``return``, beside. ``remax`` compares with ``baseline_reward``, that of the likeliest response;
    ``opmd`` within the group, by the `baseline` of mirror descent; ``gpg`` by mean, scaled up for the groups without
    signal. Or your own, ``module:function``, decorated with `dagrl.estimator`: see docs/your_own.md."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of your own estimator."""
    baseline: Literal["mean", "logavgexp"] = "mean"
    """``opmd`` only: what a reward is compared with, its group's mean or tau log(mean(exp(reward / tau)))."""
    tau: Threshold = 1.0
    """``opmd`` with ``logavgexp`` only: the `tau` of the loss."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """``gae`` only: weight of a reward one token later."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """``gae`` only: 1 takes rewards as they come; below, the critic's word for what is still to come counts for more:
    less variance, and more of the critic's own mistakes."""
    normalize_by_std: bool = True
    """``grpo`` only: divide a group's advantages by its standard deviation."""
    kl_in_reward: KlInRewardSpec | None = None
    """Penalty taken off the reward first; with ``reinforce_plus_plus``, ``remax`` and ``gae`` token by token, off what
    is still to come."""
    overlong_buffer: OverlongBufferSpec | None = None
    """Penalty on length, added to the reward first."""
    length_reward: LengthRewardSpec | None = None
    """Points for being shorter than the others of the group, added to the reward first."""
    cosine_reward: CosineRewardSpec | None = None
    """A reward by correctness and length, in place of the node's."""


class UpdateNode(TrainingNode):
    """Trains a policy on the step's samples."""

    op: Literal["update"]
    """Names this kind of node."""
    loss: LossSpec = LossSpec()
    """The objective."""
    rollout_correction: RolloutCorrectionSpec | None = None
    """What to do about samples whose log-probs differ between generator and trainer. Default: report, do nothing."""
    critic_warmup: Annotated[int, Field(ge=0)] = 0
    """Steps, from the first, in which the policy is left as it is while a critic learns."""

    @property
    def takes_rollout_for_old(self) -> bool:
        """Whether it reads the generator's log-probs as the old ones: verl's ``bypass_mode``."""
        old, rollout = (self.read.get(name, name).rpartition(".")[2] for name in ("old_logprob", "rollout_logprob"))
        return old == rollout


class CustomNode(NodeBase):
    """Your own op, ``module:function``, decorated with `dagrl.node`."""

    op: OwnFunction
    """``module:function``, looked for beside the pipeline file and on the Python path."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function."""


def _node_tag(value: Any) -> str:
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
    | Annotated[CustomNode, Tag("custom")],
    Discriminator(_node_tag),
]
