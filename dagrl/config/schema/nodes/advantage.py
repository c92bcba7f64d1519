"""`advantage`: turns rewards into advantages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import NodeBase, OpContract, Scope
from dagrl.config.schema.nodes.distillation import AdvantageDistillationSpec
from dagrl.config.schema.section import Name, OwnFunction, PositiveInt, Reward, Section, Threshold, Weight

KlValue = Literal["k1", "k2", "k3", "abs"]
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
    "gigpo",
    "maxrl",
    "gdpo",
    "passk",
    "grpo_passk",
    "rae",
    "optimal_token_baseline",
    "agentic_reinforce",
    "none",
]

_IN_GROUPS = OpContract(("group_id",), scope=Scope.GROUP)
_ESTIMATORS = {
    "reinforce_plus_plus": OpContract((), scope=Scope.BATCH),
    "reinforce_plus_plus_baseline": OpContract(("group_id",), scope=Scope.BATCH),
    "gae": OpContract(("value",), scope=Scope.BATCH),
    "remax": OpContract(("baseline_reward",), scope=Scope.ROW),
    "gpg": OpContract(("group_id",), scope=Scope.BATCH),
    "gigpo": OpContract(("group_id", "prompt_tokens", "response_tokens", "token_turn"), scope=Scope.GROUP),
    "gdpo": OpContract(("group_id",), scope=Scope.BATCH),
    "rae": OpContract((), scope=Scope.BATCH),
    "optimal_token_baseline": OpContract(("group_id", "old_logprob", "prob_square_sum"), scope=Scope.GROUP),
    "agentic_reinforce": OpContract((), scope=Scope.BATCH),
    "none": OpContract((), scope=Scope.ROW),
}
"""Estimators that compare with more than the group."""
_OF_TURNS = ("gae", "gigpo", "optimal_token_baseline", "agentic_reinforce")
"""Estimators that use rewards of turns, if there are any."""


class KlInRewardSpec(Section):
    """Subtract the divergence from the reference from the reward, before advantages are computed."""

    coef: Weight
    """Weight of the penalty."""
    estimator: KlValue = "k1"
    """Schulman's estimators of the divergence, or the distance of the log-probs."""
    target_kl: Threshold | None = None
    """Target divergence of a token: after each step the weight grows if the divergence was larger, and shrinks if it
    was smaller. Default: the weight is constant."""
    horizon: PositiveInt = 10000
    """With `target_kl`: samples over which the weight may grow or shrink by a fifth."""


class OverlongBufferSpec(Section):
    """Penalty for responses near the maximum length: DAPO's soft overlong punishment."""

    len: PositiveInt
    """Tokens before the rollout's ``max_new_tokens`` in which the penalty grows, from 0 to `penalty_factor`."""
    penalty_factor: Weight = 1.0
    """The penalty of a response of ``max_new_tokens``."""


class LengthRewardSpec(Section):
    """Reward short answers more than long ones of the same group: Kimi k1.5's length penalty.

    The shortest response of a group gets 0.5, the longest -0.5, those between in proportion; a wrong one never gets
    more than 0.
    """

    coef: Weight = 1.0
    """Its weight relative to the reward."""
    right_above: FiniteFloat = 0.0
    """Rewards above this belong to right answers."""


class CosineRewardSpec(Section):
    """A reward by correctness and length, which replaces the reward: the cosine reward of "Demystifying long CoT".

    From a response of no tokens to one of ``max_new_tokens`` it falls or rises along half a cosine.
    """

    right: tuple[Reward, Reward] = (2.0, 1.0)
    """Rewards of a right answer: the shortest and the longest."""
    wrong: tuple[Reward, Reward] = (-10.0, 0.0)
    """Rewards of a wrong answer: the shortest and the longest."""
    exceeded: Reward = -10.0
    """Reward of a response with ``max_new_tokens``."""
    right_above: FiniteFloat = 0.0
    """Rewards above this belong to right answers."""


class AdvantageNode(NodeBase):
    """Turns rewards into advantages."""

    op: Literal["advantage"]
    estimator: Estimator | OwnFunction
    """The estimator. The first four compare within a prompt's group: by mean and deviation, by mean alone, with the
    mean of the others, with the mean weighted by length. The next two are whitened over the whole step, as rewards or
    as deviations from their group's mean. ``gae`` compares with a critic's values, token by token, whitened too, and
    writes the critic's targets, ``return``, beside. ``remax`` compares with ``baseline_reward``, the reward of the
    likeliest response; ``opmd`` within the group, by the `baseline` of mirror descent; ``gpg`` by mean, scaled up for
    the groups without signal. ``gigpo`` compares responses as ``grpo`` does, and turns that follow the same answer with
    each other. ``maxrl`` divides by the group's mean; ``gdpo`` compares each of several `rewards`; ``passk`` and
    ``grpo_passk`` train the best of several responses; ``rae`` compares with a moving average of each `role`;
    ``optimal_token_baseline`` with the group, token by token; ``agentic_reinforce`` whitens discounted returns of
    turns. ``none`` reads no reward: `distillation` alone. Or your own, ``module:function``, decorated with
    `dagrl.estimator`: see docs/your_own.md."""
    args: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of your own estimator."""
    baseline: Literal["mean", "logavgexp"] = "mean"
    """``opmd`` only: the baseline of a reward: its group's mean, or tau log(mean(exp(reward / tau)))."""
    tau: Threshold = 1.0
    """``opmd`` with ``logavgexp`` only: the `tau` of the loss."""
    rewards: dict[Name, Reward] = Field(default_factory=dict)
    """``gdpo`` only: columns of rewards -> their weights. Reward nodes write them with ``write: NAME``."""
    k: PositiveInt = 4
    """``passk`` only: number k of responses of which the best one counts."""
    role: Name = "data_set"
    """``rae`` only: the column whose values have a baseline each."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """``rae`` only: decay of a baseline: after a response it is decay * baseline + (1 - decay) * reward."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """``gae``: discount of a reward one token later; ``gigpo`` and ``agentic_reinforce``: one turn later."""
    step_coef: Weight = 1.0
    """``gigpo`` only: weight of the comparison of turns."""
    mean_over: Literal["responses", "turns"] = "responses"
    """``gigpo`` only: whether a response counts once in the mean and deviation of its group's rewards, as in the paper,
    or once for each turn, as in verl-agent and ROLL."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """``gae`` only: 1 uses the rewards alone; smaller values rely more on the critic's values, with less variance and
    more bias."""
    lam_value: Annotated[float, Field(ge=0, le=1)] | None = None
    """``gae`` only: `lam` of the critic's targets. Default: the same."""
    length_adaptive_alpha: Threshold | None = None
    """``gae`` only: `lam` of the advantages is 1 - 1 / (alpha l) for a response of l tokens; VAPO has 0.05. `lam` then
    applies to the critic's targets alone."""
    normalize_by_std: bool | Literal["group", "batch", "none"] = True
    """``grpo``, ``gigpo``, ``gdpo`` and ``grpo_passk`` only: divide a group's advantages by the standard deviation of
    its rewards (true or ``group``); or, with ``grpo`` only, by that of all rewards of the step (``batch``)."""
    kl_in_reward: KlInRewardSpec | None = None
    """Penalty subtracted from the reward first; with ``reinforce_plus_plus``, ``remax``, ``gae``,
    ``optimal_token_baseline`` and ``agentic_reinforce`` token by token, from the future rewards."""
    overlong_buffer: OverlongBufferSpec | None = None
    """Penalty on length, added to the reward first."""
    length_reward: LengthRewardSpec | None = None
    """Reward for responses shorter than others of the group, added to the reward first."""
    cosine_reward: CosineRewardSpec | None = None
    """A reward by correctness and length, which replaces the reward."""
    distillation: AdvantageDistillationSpec | None = None
    """On-policy distillation: differences from a teacher's log-probs, added to the advantages before these are
    whitened."""

    @property
    def deviation(self) -> bool | Literal["batch"]:
        """`normalize_by_std`, with one name for each choice."""
        given = self.normalize_by_std
        return "batch" if given == "batch" else given in (True, "group")

    @property
    def user_function(self) -> tuple[tuple[str, ...], str] | None:
        return (("estimator",), self.estimator) if ":" in self.estimator else None

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        critic = self.estimator == "gae"
        turn_rewards = self.estimator in _OF_TURNS
        formula = declared or _ESTIMATORS.get(self.estimator, _IN_GROUPS)
        rewards = {"none": (), "gdpo": tuple(self.rewards)}.get(self.estimator, ("reward",))
        roles = (self.role,) if self.estimator == "rae" else ()
        reads, scope = (*rewards, "response_mask", *formula.reads, *roles), formula.scope
        if self.deviation == "batch":
            scope = Scope.BATCH
        if self.length_reward:
            reads += ("group_id",)
            scope = Scope.GROUP if scope is Scope.ROW else scope
        if self.kl_in_reward:
            reads += ("old_logprob", "ref_logprob")
        if self.distillation:
            reads += ("old_logprob", "teacher_logprob")
        taught = ("teacher_mask",) if self.distillation else ()
        return OpContract(
            tuple(dict.fromkeys(reads)),
            ("advantage", "return") if critic else ("advantage",),
            scope,
            reads_if_written=("is_expert", "excluded", *taught, *(("token_reward",) if turn_rewards else ())),
        )
