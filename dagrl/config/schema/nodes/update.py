"""`update`: trains a policy on samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from dagrl.config.capability import Capability
from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.advantage import KlValue
from dagrl.config.schema.nodes.base import Aggregation, OpContract, Scope, TrainingNode, routes_read
from dagrl.config.schema.nodes.distillation import LossDistillationSpec
from dagrl.config.schema.section import Coefficient, OwnFunction, Section, Threshold, Weight

KlEstimator = Literal[KlValue, "k1+", "k3+", "abs+", "k1*", "k2*", "k3*"]
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
    "dppo_tv",
    "dppo_kl",
    "vespo",
    "fipo",
    "m2po",
    "dro",
    "none",
]
ImportanceLevel = Literal["token", "sequence"]
RatioCriterion = Literal["token", "sequence", "geometric"]
DivergenceCriterion = Literal[
    "token_k2",
    "token_k3",
    "token_tv",
    "token_binary_kl",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_sum_tv",
    "seq_sum_binary_kl",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_mean_tv",
    "seq_mean_binary_kl",
    "seq_max_k2",
    "seq_max_k3",
    "seq_max_tv",
    "seq_max_binary_kl",
]
RejectionCriterion = RatioCriterion | DivergenceCriterion

_WITH_OLD = OpContract(("old_logprob",), scope=Scope.BATCH)
_LOSSES = {
    **dict.fromkeys(("clip_cov", "kl_cov", "m2po"), OpContract(("old_logprob", "clip_cov_mask"), scope=Scope.BATCH)),
    "opmd_pairwise": OpContract(("old_logprob", "group_id"), scope=Scope.BATCH),
    "none": OpContract((), scope=Scope.BATCH),
}
"""Losses with other inputs than the old log-probs."""


class LossSpec(Section):
    """The policy objective."""

    policy: PolicyForm | OwnFunction = "ppo_clip"
    """Form of the policy loss. ``gspo`` clips the ratio of whole responses, ``gmpo`` the tokens before it takes their
    geometric mean; ``sapo`` has a gate in place of the clip; ``cispo`` clips only the weight of a token's gradient,
    from above, ``cpgd`` the log of the ratio; ``reinforce`` is the policy gradient without a ratio, ``topr`` the same
    with less weight on bad responses that have become unlikely; ``opmd`` divides it by 1 + `tau`, ``opmd_kimi`` draws
    it back to the policy from before the update, ``opmd_pairwise`` pair by pair of a prompt's responses; ``clip_cov``
    is ``ppo_clip`` without the tokens that a node `{op: covariance}` marks, ``kl_cov`` penalises the divergence of
    these tokens instead of clipping, ``m2po`` masks them without a clip; ``dppo_tv`` and ``dppo_kl`` bound the change
    of a token's probability in place of its ratio; ``vespo`` weighs responses by a smooth function of their ratio;
    ``fipo`` is ``ppo_clip`` with more weight on tokens after which the response has become likelier; ``dro`` draws
    tokens back as ``opmd_kimi`` does responses. ``none`` reads no advantage: the loss is `distillation` alone.
    docs/algorithms.md has the formulas. Or your own, ``module:function``, decorated with `dagrl.loss`: see
    docs/your_own.md."""
    args: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of your own loss."""
    clip_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped to 1 - clip_ratio and 1 + clip_ratio; with ``cispo`` there is only the upper bound, with
    ``gmpo`` the log of the ratio is kept within -clip_ratio and clip_ratio, 0.4 in the paper. With ``dppo_tv`` a bound
    on the change of a token's probability, with ``dppo_kl`` on the divergence, 0.05 in verl's script."""
    clip_ratio_high: Annotated[float, Field(gt=0)] | None = None
    """A separate upper bound. Default: clip_ratio."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """``ppo_clip`` and ``fipo``: bound on the loss of negative advantages (dual-clip PPO), 3.0 in the paper. Default:
    none."""
    ratio_cap: Annotated[float, Field(gt=1)] | None = None
    """``dppo_tv`` and ``dppo_kl`` only: bound on the ratio as a weight: verl's ``clip_ratio_c``. Default: none."""
    off_policy_delta: Coefficient | None = None
    """Removes a response's tokens with a negative advantage from the policy loss if the response's log-probs are below
    the old ones by more than this on average: the off-policy sequence mask of DeepSeek-V3.2. Default: no mask."""
    kl_cov_coef: Weight = 1.0
    """``kl_cov`` only: weight of the divergence of the marked tokens from the old policy."""
    drift_coef: Weight = 0.0
    """``cpgd`` only: weight of the divergence from the policy before the update, 0.01 in the authors' code."""
    tau_pos: Threshold = 1.0
    """``sapo`` only: temperature of the gate for positive advantages; larger values close it sooner."""
    tau_neg: Threshold = 1.05
    """``sapo`` only: temperature of the gate for other advantages."""
    tau: Coefficient = 1.0
    """``opmd``, ``opmd_kimi``, ``opmd_pairwise`` and ``dro`` only: strength of the regularisation towards the old
    policy."""
    k_pos: Coefficient = 2.0
    """``vespo`` only: the power of the response's ratio for advantages that are not negative."""
    k_neg: Coefficient = 3.0
    """``vespo`` only: the same for negative advantages."""
    lambda_pos: Threshold = 3.0
    """``vespo`` only: decay of the weight as the ratio grows, for advantages that are not negative."""
    lambda_neg: Threshold = 2.0
    """``vespo`` only: the same for negative advantages."""
    half_life: Threshold = 32.0
    """``fipo`` only: tokens after which the log-ratio of a later token counts half."""
    future_low: Annotated[float, Field(ge=0, le=1)] = 0.0
    """``fipo`` only: a token's weight is 1 - `future_low` at least."""
    future_high: Weight = 0.2
    """``fipo`` only: a token's weight is 1 + `future_high` at most."""
    future_safety: Threshold = 10.0
    """``fipo`` only: with a ratio above this and a negative advantage, a token's weight is within 0.8 and 1."""
    kl_coef: Weight = 0.0
    """Weight of the divergence from the reference."""
    kl_estimator: KlEstimator = "k3"
    """Schulman's estimators of the divergence, or the distance of the log-probs. With ``+`` the estimate has the
    gradient of ``k2``, which is the divergence's gradient; with ``*`` it is multiplied by the ratio to the old
    probability, the unbiased estimate of DeepSeek-V3.2. ``k3`` is at most 10 for a token."""
    entropy_coef: Weight = 0.0
    """Coefficient of the entropy bonus."""
    sft_coef: Annotated[float, Field(ge=0, le=1)] = 0.0
    """mu in (1 - mu) * this loss on sampled responses + mu * the negative log-likelihood of the expert responses of a
    ``mix`` node; each term over its own responses. Default: experts' responses are not trained on."""
    distillation: LossDistillationSpec | None = None
    """On-policy distillation: the divergence from a teacher, added to the loss."""
    observation_coef: Weight = 0.0
    """Weight of the negative log-likelihood of answers of tools and environments, in the mean over their tokens: ECHO,
    with 0.1. Needs a rollout of several turns."""
    aggregation: Aggregation | None = None
    """Reduction of token losses over the global mini-batch; the last option divides sums by the rollout's
    ``max_new_tokens``, for Dr. GRPO. Default: token-mean; with ``gspo`` and ``gmpo`` seq-mean-token-mean."""

    @property
    def weighting(self) -> Aggregation:
        """`aggregation`, or its default."""
        of_responses = self.policy in ("gspo", "gmpo")
        return self.aggregation or ("seq-mean-token-mean" if of_responses else "token-mean")

    @property
    def is_sum_over_tokens(self) -> bool:
        """Whether a token's loss depends on no other token's log-prob; False for user losses."""
        of_responses = ("gspo", "gmpo", "topr", "opmd_kimi", "opmd_pairwise", "vespo", "fipo")
        return self.policy not in of_responses and self.off_policy_delta is None and ":" not in self.policy

    @property
    def reads_old(self) -> bool:
        """Whether the loss compares the policy with the one before the update, not only its metrics."""
        masked = self.off_policy_delta is not None
        return self.policy not in ("reinforce", "opmd") or self.has_unbiased_divergence or masked

    @property
    def has_unbiased_divergence(self) -> bool:
        """Whether the divergence from the reference is weighed by the ratio to the old policy."""
        return self.kl_coef > 0 and self.kl_estimator.endswith("*")

    @property
    def has_ratio(self) -> bool:
        """Whether a token's gradient is multiplied by the policy's ratio to the old one; True for user losses."""
        others = ("cpgd", "reinforce", "opmd", "opmd_kimi", "opmd_pairwise", "dro", "none")
        return self.policy not in others and ":" not in self.policy


@dataclass(frozen=True, slots=True)
class Rejection:
    """A criterion of ``rollout_rs`` with its bounds."""

    criterion: RejectionCriterion
    upper: float
    lower: float | None
    """Default: 1 / `upper`; divergences have no lower bound."""


class RolloutCorrectionSpec(Section):
    """Weigh or reject samples by the difference between the log-probs of trainer and generator.

    r is the probability of a token for the trainer divided by the one for the generator. docs/mismatch.md explains it.
    """

    rollout_is: ImportanceLevel | None = None
    """Multiply the policy's loss with r (``token``), or with the product of r over the response (``sequence``)."""
    rollout_is_threshold: Threshold = 2.0
    """Larger weights are cut to this: truncated importance sampling."""
    rollout_is_threshold_lower: Threshold | None = None
    """If set, weights below this and above `rollout_is_threshold` are 0 instead: IcePop, with 0.5 and 5.0."""
    rollout_is_batch_normalize: bool = False
    """Divide weights by their mean over the mini-batch; needs the old log-probs."""
    rollout_rs: RejectionCriterion | Annotated[list[RejectionCriterion], Field(min_length=1)] | None = None
    """Criterion that removes tokens, or whole responses, from the loss: r of the token, its product over the response,
    or its geometric mean (``geometric``); or the k2 or k3 estimate of the divergence, the change of the token's
    probability (``tv``) or the divergence of the choice between it and the rest (``binary_kl``), of the token, or its
    sum, mean or maximum over the response. Several criteria are applied independently."""
    rollout_rs_threshold: Threshold | list[Threshold] | None = None
    """Largest ratio or divergence that is kept: one bound for all criteria, or one for each."""
    rollout_rs_threshold_lower: Threshold | list[Threshold | None] | None = None
    """Smallest ratio that is kept: one bound for all criteria, or one for each, null for the default and for
    divergences. Default: 1 / `rollout_rs_threshold`."""
    rollout_token_veto_threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Removes responses from the loss that have a token with r below this, such as 1.0e-4."""

    @property
    def criteria(self) -> tuple[RejectionCriterion, ...]:
        """The criteria of `rollout_rs`."""
        return (self.rollout_rs,) if isinstance(self.rollout_rs, str) else tuple(self.rollout_rs or ())

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The criteria with their bounds. Validation checks that their numbers match, and that each criterion has an
        upper bound.
        """
        criteria, given = self.criteria, (self.rollout_rs_threshold, self.rollout_rs_threshold_lower)
        uppers, lowers = (value if isinstance(value, list) else [value] * len(criteria) for value in given)
        return tuple(
            Rejection(criterion, upper, lower)
            for criterion, upper, lower in zip(criteria, uppers, lowers, strict=True)
            if upper is not None
        )

    @property
    def is_of_tokens(self) -> bool:
        """Whether a token's correction depends on no other token's log-probs."""
        return (
            self.rollout_is != "sequence"
            and all(criterion.startswith("token") for criterion in self.criteria)
            and self.rollout_token_veto_threshold is None
        )


class UpdateNode(TrainingNode):
    """Trains a policy on the step's samples."""

    op: Literal["update"]
    loss: LossSpec = LossSpec()
    """The objective."""
    rollout_correction: RolloutCorrectionSpec | None = None
    """Correction for differences of log-probs between generator and trainer. Default: report only."""
    critic_warmup: Annotated[int, Field(ge=0)] = 0
    """First steps of the run in which only a critic is trained, not the policy."""

    @property
    def loss_is_sum_over_tokens(self) -> bool:
        correction = self.rollout_correction
        return self.loss.is_sum_over_tokens and (correction is None or correction.is_of_tokens)

    @property
    def takes_rollout_for_old(self) -> bool:
        """Whether it reads the generator's log-probs as the old ones: verl's ``bypass_mode``."""
        old, rollout = (self.read.get(name, name).rpartition(".") for name in ("old_logprob", "rollout_logprob"))
        # Two nodes may write columns of the same name.
        return old[2] == rollout[2] and (old[0] == rollout[0] or not (old[0] and rollout[0]))

    @property
    def user_function(self) -> tuple[tuple[str, ...], str] | None:
        return (("loss", "policy"), self.loss.policy) if ":" in self.loss.policy else None

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        advantage = () if self.loss.policy == "none" else ("advantage",)
        reads = ("prompt_tokens", "response_tokens", "response_mask", *advantage, "policy_version")
        needed = {
            "ref_logprob": self.loss.kl_coef > 0,
            "rollout_logprob": self.rollout_correction is not None,
            "is_expert": self.loss.sft_coef > 0,
            **({"token_turn": True} if self.loss.observation_coef else {}),
            "trajectory_share": False,
            "token_version": False,
            "is_replayed": False,
        }
        if self.loss.distillation:
            needed |= dict.fromkeys(self.loss.distillation.columns, True) | {"teacher_mask": False}
            if self.loss.distillation.is_clip:
                needed["old_logprob"] = False
        formula = declared or _LOSSES.get(self.loss.policy, _WITH_OLD)
        needed |= dict.fromkeys(formula.reads, True)
        if "old_logprob" in formula.reads or self.loss.has_unbiased_divergence:
            # Without old log-probs, the log-probs of the trained weights replace them.
            needed["old_logprob"] = False
        reads += tuple(column for column, must in needed.items() if must) + routes_read(engine)
        return OpContract(
            tuple(dict.fromkeys(reads)),
            (),
            Scope.BATCH,
            reads_if_written=tuple(column for column, must in needed.items() if not must),
            needs=Capability.TRAIN,
            # A loss with groups compares the responses of a group.
            whole_groups="group_id" in formula.reads,
        )
