"""Nodes: the stages of a step."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, FiniteFloat, Tag

from dagrl.config.schema.objective import (
    Aggregation,
    CosineRewardSpec,
    KlInRewardSpec,
    LengthRewardSpec,
    LossSpec,
    OverlongBufferSpec,
    RolloutCorrectionSpec,
)
from dagrl.config.schema.sampling import SamplingSpec, TurnOptions
from dagrl.config.schema.section import (
    Coefficient,
    Concurrency,
    Name,
    OwnFunction,
    PositiveInt,
    Responses,
    Reward,
    Seconds,
    Section,
    Threshold,
    Tokens,
    Weight,
)


class NodeBase(Section):
    """Options of every node."""

    read: dict[str, str] = Field(default_factory=dict)
    """Column the op reads -> where it comes from: another column, or ``node.column``."""
    read_from: tuple[Name, ...] = ()
    """Nodes to read from where several write a column, instead of naming them column by column."""
    write: str | dict[str, str] | None = None
    """Name of the column it writes, or (op's name -> name in this pipeline) where it writes several."""

    def written_as(self, column: str) -> str:
        """The pipeline's name of the only column of an op, `column`."""
        return self.write.get(column, column) if isinstance(self.write, dict) else self.write or column


class TrainingNode(NodeBase):
    """Options of every node that trains an engine, in optimizer steps of one mini-batch each."""

    op: str
    """Names this kind of node."""
    engine: Name
    """The engine that is trained."""
    mini_batch: PositiveInt | None = None
    """Prompts in one optimizer step. Default: all of the step."""
    mini_batch_per_node: PositiveInt | None = None
    """Instead of `mini_batch`: prompts in one optimizer step for each machine, as with ``data.prompts_per_node``."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    """Passes over the step's samples."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Packed tokens in one forward and backward pass of a model replica."""

    def optimizer_steps(self, prompts_per_step: int) -> int:
        """Optimizer steps on one step's batch."""
        return -(-prompts_per_step // (self.mini_batch or prompts_per_step)) * self.epochs


class CovarianceNode(NodeBase):
    """Marks the tokens through which an update would cost most of the entropy, for ``policy: clip_cov`` or ``kl_cov``.

    Those are the ones whose log-prob, before the update, and advantage are both far above the mean, or both far below.
    """

    op: Literal["covariance"]
    """Names this kind of node."""
    share: Annotated[float, Field(gt=0, le=1)] = 2.0e-4
    """Part of the step's tokens that are marked, one at least."""
    between: tuple[FiniteFloat, FiniteFloat] | None = None
    """Draw them from all tokens whose product of the two deviations is between these bounds, as Clip-Cov does with 1.0
    and 5.0. Default: those with the largest, as KL-Cov does."""


class ValuesNode(NodeBase):
    """A critic's values: the expected return from each token on, for ``estimator: gae``."""

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
    """The critic: an engine with ``head: value``, and its own model or a copy of the policy's start."""
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
    """An engine with ``head: reward``. It scores the sampled tokens as they are, or, if its backend reads messages
    (``hf``), prompt and response as a conversation with the chat template of its own model."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Packed tokens in one forward pass of a model replica."""


class FilterNode(NodeBase):
    """Takes only groups that something can be learned from into the step: dynamic sampling.

    What comes before it runs in rounds, each on new prompts, until ``data.prompts_per_step`` groups have passed.
    Everything else works on those alone. Validation is not filtered.
    """

    op: Literal["filter"]
    """Names this kind of node."""
    metric: Name = "reward"
    """The column that is looked at: one with a number for each sample."""
    lower: FiniteFloat | None = None
    """A group passes if its mean is above this."""
    upper: FiniteFloat | None = None
    """A group passes if its mean is below this."""
    min_std: Coefficient | None = None
    """A group passes if its standard deviation is above this. Default: 0 where there is neither `lower` nor `upper`, so
    that its values are not all the same."""
    fn: OwnFunction | None = None
    """Your own rule instead, ``module:function``: it takes columns of a group by name and returns whether it
    passes."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of `fn`."""
    prompts_per_round: PositiveInt | None = None
    """Prompts of the first round, and of a later one at most: those take as many as are likely to be missing. Default:
    ``data.prompts_per_step``. More of them make further rounds rare; what is left over is thrown away."""
    max_rounds: PositiveInt = 10
    """Rounds in which a step has to be full."""
    when_short: Literal["stop", "fill"] = "stop"
    """When it is not: end the run, or fill the step up with groups that did not pass."""
    expected_kept_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Part of the groups that will pass, for `dagrl plan` alone. Default: it counts with one round."""

    @property
    def least_std(self) -> float | None:
        """Lower bound of a group's standard deviation, if there is one."""
        return 0.0 if self.min_std is None and self.lower is None and self.upper is None else self.min_std


class JudgeNode(NodeBase):
    """Asks a language model about each response, and finds a score in its reply."""

    op: Literal["judge"]
    """Names this kind of node."""
    engine: Name | None = None
    """An engine of this pipeline that generates, asked by the chat template of its model. One that follows a trained
    engine judges with the weights that it has for the step's samples."""
    endpoint: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """Instead of an engine: the address of a server that speaks OpenAI's protocol, as ``http://host:8000/v1``."""
    model: str | None = None
    """The model's name there."""
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Environment variable that holds the key for the endpoint. The key itself is written nowhere. Default: no key."""
    prompt: str
    """The question. ``{prompt}``, ``{response}``, ``{answer}`` and ``{data_source}`` are filled in; other braces
    stay."""
    system: str | None = None
    """A system message before it, as it is. Default: none."""
    parser: str = r"-?\d+(?:\.\d+)?"
    """Finds the score in the reply: a regular expression, whose last match counts (or its first group), or your own
    function as ``module:function``."""
    scores: Annotated[dict[str, Reward], Field(min_length=1)] | None = None
    """Scores of the words that the regular expression finds, as ``{GOOD: 1, BAD: 0}``. Default: it finds a number."""
    sampling: SamplingSpec = SamplingSpec(temperature=0.0, max_new_tokens=1024)
    """Sampling of the reply."""
    max_prompt_tokens: Tokens = 8192
    """Engines only: longest question, chat template applied; a sample with a longer one fails."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Engines only: further arguments of the chat template, as ``{enable_thinking: false}``."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Endpoints only: further fields of the request, or others instead; ``null`` leaves one out."""
    concurrency: Concurrency = 32
    """Endpoints only: questions at once, for each worker."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 5
    """Endpoints only: how often a question is asked again that is not answered, with growing pauses."""
    timeout_s: Seconds = 120.0
    """Endpoints only: how long an answer may take."""
    expected_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Endpoints only: seconds that an answer takes, for `dagrl plan` alone. Default: 15 ms for each token of the reply,
    which is taken to be half as long as it may be."""
    on_error: Literal["stop"] | Reward = "stop"
    """When there is no reply, or no score in it: stop the run and name the sample, or give it this reward. A refused
    key or address always stops the run."""


class DemonstrationNode(TrainingNode):
    """Options of the nodes that train on demonstrations."""

    val_loss: bool = True
    """Tell the loss on ``data.val`` too, in each validation, where nothing is trained on samples: its files need the
    columns of ``data.responses`` then."""

    @property
    def learns_from_data(self) -> bool:
        """Whether its demonstrations are those of the data set, and not what another node writes."""
        return self.read.get("demonstration", "demonstration").rpartition(".")[2] == "demonstration"


class SftNode(DemonstrationNode):
    """Trains an engine on the data set's responses: supervised fine-tuning."""

    op: Literal["sft"]
    """Names this kind of node."""
    aggregation: Aggregation = "token-mean"
    """How the losses of tokens become one number, as in an update's ``loss``."""


class DpoNode(DemonstrationNode):
    """Trains an engine to prefer the first of a prompt's two responses: direct preference optimization."""

    op: Literal["dpo"]
    """Names this kind of node."""
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    """How strongly the reference holds it back: weight of the divergence from it."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """``sigmoid`` is DPO's own; ``ipo`` draws the difference of log-ratios to 1 / (2 beta) and not further; ``hinge``
    is content with a difference of 1 / beta."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """``sigmoid`` only: share of the pairs whose labels may be wrong (conservative DPO)."""
    sft_coef: Weight = 0.0
    """Weight of the likelihood of chosen responses, over their lengths, added to the loss."""


class MixNode(NodeBase):
    """Puts responses of the data set into the groups of a rollout: the last of each group become an expert's.

    Later nodes, rewards too, see the mixed group; ``is_expert`` marks the expert's rows. Advantages compare the
    policy's rows only. ``loss.sft_coef`` of an update weighs the expert's rows. In validation nothing is mixed.
    """

    op: Literal["mix"]
    """Names this kind of node."""
    per_prompt: PositiveInt = 1
    """Responses of each group that become the expert's."""


class RolloutNode(NodeBase, TurnOptions):
    """Samples `n` responses to each prompt."""

    op: Literal["rollout"]
    """Names this kind of node."""
    engine: Name
    """The engine that generates."""
    n: Responses = 1
    """Responses for each prompt; together they are a group. A rollout behind another one answers each row once."""
    sampling: SamplingSpec
    """Sampling in training."""
    val_sampling: SamplingSpec | None = None
    """Sampling in validation. Default: as in training, with temperature 0."""
    val_n: Responses = 1
    """Responses for each prompt in validation; several need a `val_sampling` with a temperature."""
    over_sampling_batch_size: PositiveInt | None = None
    """Prompts that a training step begins, more than it needs: the first ``data.prompts_per_step`` whose responses are
    complete make the step, the slowest are aborted. Default: no more than it needs."""
    partial_rollout: bool = False
    """Continue aborted responses in the next step. Default: they are discarded, and their prompts come again in the
    next epoch."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Mask tokens that older weights sampled: their ``response_mask`` is 0."""
    partial_rollout_max_age: PositiveInt = 4
    """Policy versions that sampled tokens may be behind; a response with older ones starts again."""
    max_prompt_tokens: Tokens | None = None
    """Longest prompt where a node of the pipeline makes the prompts: a longer one ends the run.
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
    """Samples scored at once, each in a thread: useful if the function waits for others. Default: as the function is
    marked; for ``code`` the number of cores, otherwise one."""
    expected_s: Coefficient | None = None
    """Seconds per sample, for `dagrl plan` only, which divides them by `concurrency`. Default: measured figures for
    ``math`` and ``code``, almost nothing for others."""


class LogprobNode(NodeBase):
    """Log-probs of the sampled tokens under an engine's current weights.

    Skipped if only an update of the same engine reads it, as ``old_logprob``, with one optimizer step for each batch:
    the ratio is 1 then.
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
    """Correction of samples whose log-probs differ between generator and trainer. Default: report only."""
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
