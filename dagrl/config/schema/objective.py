"""Options of advantages and losses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from dagrl.config.schema.section import Coefficient, OwnFunction, PositiveInt, Reward, Section, Threshold, Weight

KlValue = Literal["k1", "k2", "k3", "abs"]
KlEstimator = Literal[KlValue, "k1+", "k3+", "abs+"]


class KlInRewardSpec(Section):
    """Charge the divergence from the reference to the reward, before advantages."""

    coef: Weight
    """Weight of the penalty."""
    estimator: KlValue = "k1"
    """Schulman's estimators of the divergence, or the mere distance of the log-probs."""
    target_kl: Threshold | None = None
    """Divergence of a token to steer for: after each step the weight grows where there was more, and shrinks where
    there was less. Default: the weight stays as it is."""
    horizon: PositiveInt = 10000
    """With `target_kl`: samples over which the weight may grow or shrink by a fifth."""


class OverlongBufferSpec(Section):
    """Penalty for responses near the maximum length: DAPO's soft overlong punishment."""

    len: PositiveInt
    """Tokens before the rollout's ``max_new_tokens`` in which the penalty grows, from 0 to `penalty_factor`."""
    penalty_factor: Weight = 1.0
    """The penalty of a response of ``max_new_tokens``."""


class LengthRewardSpec(Section):
    """Give short answers more than long ones of the same group: Kimi k1.5's length penalty.

    The shortest response of a group gets 0.5, the longest -0.5, those between in proportion; a wrong one never gets
    more than 0.
    """

    coef: Weight = 1.0
    """Weight of it, beside the reward that it is added to."""
    right_above: FiniteFloat = 0.0
    """Rewards above this belong to right answers."""


class CosineRewardSpec(Section):
    """A reward by correctness and length, in place of the node's own: the cosine reward of "Demystifying long CoT".

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


PolicyForm = Literal[
    "ppo_clip",
    "gspo",
    "gmpo",
    "sapo",
    "cispo",
    "cpgd",
    "reinforce",
    "topr",
    "opmd",
    "opmd_kimi",
    "opmd_pairwise",
    "clip_cov",
    "kl_cov",
]


Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class LossSpec(Section):
    """The policy objective."""

    policy: PolicyForm | OwnFunction = "ppo_clip"
    """Form of the policy loss. ``gspo`` clips the ratio of whole responses, ``gmpo`` the tokens before it takes their
    geometric mean; ``sapo`` has a gate in place of the clip; ``cispo`` clips only the weight of a token's gradient,
    from above, ``cpgd`` the log of the ratio; ``reinforce`` is the policy gradient without a ratio, ``topr`` the same
    with less weight on bad responses that have become unlikely; ``opmd`` divides it by 1 + `tau`, ``opmd_kimi`` draws
    it back to the policy from before the update, ``opmd_pairwise`` pair by pair of a prompt's responses; ``clip_cov``
    is ``ppo_clip`` without the tokens that a node `{op: covariance}` marks, ``kl_cov`` has no clip and draws those back
    instead. docs/algorithms.md has the formulas. Or your own, ``module:function``, decorated with `dagrl.loss`: see
    docs/your_own.md."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of your own loss."""
    clip_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Ratio is kept within 1 - clip_ratio and 1 + clip_ratio; with ``cispo`` there is only the upper bound, with
    ``gmpo`` the log of the ratio is kept within -clip_ratio and clip_ratio, 0.4 in the paper."""
    clip_ratio_high: Annotated[float, Field(gt=0)] | None = None
    """A separate upper bound. Default: clip_ratio."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """``ppo_clip`` only: bound on the loss of negative advantages (dual-clip PPO), 3.0 in the paper. Default: none."""
    kl_cov_coef: Weight = 1.0
    """``kl_cov`` only: how strongly the marked tokens are drawn back to where they were."""
    drift_coef: Weight = 0.0
    """``cpgd`` only: weight of the divergence from the policy before the update, 0.01 in the authors' code."""
    tau_pos: Threshold = 1.0
    """``sapo`` only: how soon the gate closes where the advantage is positive."""
    tau_neg: Threshold = 1.05
    """``sapo`` only: how soon it closes elsewhere."""
    tau: Coefficient = 1.0
    """``opmd``, ``opmd_kimi`` and ``opmd_pairwise`` only: how strongly the policy is held back."""
    kl_coef: Weight = 0.0
    """Weight of the divergence from the reference."""
    kl_estimator: KlEstimator = "k3"
    """Schulman's estimators of the divergence, or the mere distance of the log-probs. With ``+`` the value of one with
    the gradient of ``k2``, which is that of the divergence. ``k3`` is at most 10 for a token."""
    entropy_coef: Weight = 0.0
    """Weight of the entropy bonus."""
    sft_coef: Annotated[float, Field(ge=0, le=1)] = 0.0
    """mu of (1 - mu) times this loss on sampled responses + mu times the negative log-likelihood of the experts' that a
    ``mix`` node has put among them; each over its own responses. Default: experts' responses are not trained on."""
    aggregation: Aggregation | None = None
    """How token losses become one number, over the global mini-batch; the last divides sums by the rollout's
    ``max_new_tokens``, for Dr. GRPO. Default: token-mean; with ``gspo`` and ``gmpo`` seq-mean-token-mean."""

    @property
    def weighting(self) -> Aggregation:
        """`aggregation`, or what it is by default."""
        of_responses = self.policy in ("gspo", "gmpo")
        return self.aggregation or ("seq-mean-token-mean" if of_responses else "token-mean")


ImportanceLevel = Literal["token", "sequence"]


RatioCriterion = Literal["token", "sequence", "geometric"]


DivergenceCriterion = Literal[
    "token_k2", "token_k3", "seq_sum_k2", "seq_sum_k3", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"
]


RejectionCriterion = RatioCriterion | DivergenceCriterion


class RolloutCorrectionSpec(Section):
    """Weigh or reject samples by how far the trainer's log-probs are from those that they were drawn with.

    By r, the probability of a token for the trainer over that for the generator. docs/mismatch.md explains it.
    """

    rollout_is: ImportanceLevel | None = None
    """Multiply the policy's loss with r (``token``), or with the product of r over the response (``sequence``)."""
    rollout_is_threshold: Threshold = 2.0
    """Larger weights are cut to this: truncated importance sampling."""
    rollout_is_threshold_lower: Threshold | None = None
    """With it, weights below this and above `rollout_is_threshold` are 0 instead: IcePop, with 0.5 and 5.0."""
    rollout_is_batch_normalize: bool = False
    """Divide weights by their mean over the mini-batch; needs the old log-probs."""
    rollout_rs: RejectionCriterion | None = None
    """Criterion that removes tokens, or whole responses, from the loss: r of the token, its product over the response,
    or its geometric mean (``geometric``); or the k2 or k3 estimate of the divergence, of the token, or its sum, mean
    or largest over the response."""
    rollout_rs_threshold: Threshold | None = None
    """Largest ratio, or divergence, that stays."""
    rollout_rs_threshold_lower: Threshold | None = None
    """Smallest ratio that stays. Default: 1 / `rollout_rs_threshold`."""
    rollout_token_veto_threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Takes whole responses out of the loss that have a token with r below this, such as 1.0e-4."""
