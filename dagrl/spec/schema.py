"""What a pipeline file may say: frozen models, one per section, that refuse unknown keys.

``load.py`` turns YAML into a `Pipeline`; ``checks.py`` holds the rules that join several sections or look at
files; ``ops.py`` says which columns each node reads and writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, FiniteFloat, Tag

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
PositiveInt = Annotated[int, Field(ge=1)]
Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sleep = Literal["auto"] | bool
"""Whether an engine gives its devices' memory back while another engine of its group works."""


class Section(BaseModel):
    """A mapping of the pipeline file: immutable, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TokenizerSpec(Section):
    """A small tokenizer made from the pipeline file, for models that start from random weights."""

    kind: Literal["characters", "bytes"]
    """``characters``: one token for each character of `alphabet`; ``bytes``: one for each byte of UTF-8."""
    alphabet: str = ""
    """The characters that the model knows (``characters`` only)."""


class ModelSpec(Section):
    """The policy that is trained: a Hugging Face folder, or random weights of a stated shape."""

    path: Path | None = None
    """A Hugging Face folder with config.json, safetensors and a tokenizer."""
    init: dict[str, Any] | None = None
    """Random weights instead: the fields of a Hugging Face config, ``model_type`` among them."""
    tokenizer: Path | TokenizerSpec | None = None
    """A folder with a Hugging Face tokenizer, or one made on the spot. Default: the model's folder."""


class DataSpec(Section):
    """Prompts in verl's parquet schema: prompt, data_source, reward_model.ground_truth, extra_info."""

    train: Path
    """Parquet file with the training prompts."""
    val: Path | None = None
    """Parquet file with the validation prompts."""
    prompts_per_step: PositiveInt
    """Prompts in one step; the batch has ``prompts_per_step * n`` samples."""
    max_prompt_tokens: PositiveInt
    """Longest prompt, in tokens."""
    overlong_prompts: Literal["drop", "cut", "error"] = "drop"
    """What happens to longer ones: left out, cut at their beginning, or an error. Dropped and cut are counted."""
    shuffle: bool = True
    """A new order each epoch, drawn from ``run.seed``."""
    val_prompts: PositiveInt | None = None
    """Use only the first so many validation prompts."""


class GroupSpec(Section):
    """A named set of GPUs, or of CPU slots where there is no GPU."""

    nodes: PositiveInt = 1
    """Machines in the group."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs on each; one engine rank each."""
    cpus_per_node: Annotated[int, Field(ge=0)] = 0
    """Instead of GPUs: CPU slots on each; one engine rank each."""

    @property
    def is_cpu(self) -> bool:
        """Whether the group's ranks run without a GPU."""
        return self.gpus_per_node == 0

    @property
    def ranks(self) -> int:
        """Engine ranks that the group holds."""
        return self.nodes * (self.gpus_per_node or self.cpus_per_node)


class ParallelSpec(Section):
    """Megatron's parallel layout. Data parallel is what remains: ranks / (tp * pp * cp)."""

    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Stages of layers."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Chunks of layers on each stage, for the interleaved schedule. Default: one, without interleaving."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share each sequence."""
    expert_model_parallel_size: PositiveInt = 1
    """Ranks that share the experts of a mixture; taken out of the tensor, context and data-parallel ones."""
    expert_tensor_parallel_size: PositiveInt = 1
    """Ranks that share each expert's matrices. Default: 1, whatever the tensor-parallel size: experts stay whole."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence."""

    @property
    def row_alignment(self) -> int:
        """What the length of every packed row is padded to a multiple of, so that ranks share out its tokens evenly."""
        context = self.context_parallel_size
        chunks = 2 * context if context > 1 else 1
        return chunks * (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    def data_parallel_size(self, ranks: int) -> int:
        """Model replicas on `ranks` ranks; the sizes are checked to divide when the file is loaded."""
        return ranks // (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )


class LearningRateSpec(Section):
    """Learning-rate schedule, in Megatron's names; the peak is ``optimizer.lr``."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    """Shape after the warm-up."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear rise from 0, counted in pipeline steps."""
    lr_decay_steps: PositiveInt | None = None
    """Step at which `min_lr` is reached. Default: ``run.steps``."""
    min_lr: Coefficient = 0.0
    """Floor of the decay."""


class OffloadSpec(Section):
    """What waits in host memory while the engine does not use it."""

    param: bool = False
    """Weights, between the engine's tasks."""
    grad: bool = False
    """Gradient buffers, between updates: their memory is freed, as gradients outlive no update."""
    optimizer: bool = False
    """Optimizer states and float32 weights, except during the optimizer's step."""


class MegatronEngineSpec(Section):
    """A Megatron-core model: trains, and computes log-probs."""

    backend: Literal["megatron"]
    """Megatron-core, with Transformer Engine on GPUs."""
    group: Name | None = None
    """The group that holds it."""
    shares: Name | None = None
    """Instead of a group: live on that engine's ranks, as its frozen start weights, swapped in when asked for."""
    parallel: ParallelSpec = ParallelSpec()
    """Parallel layout."""
    transformer: dict[str, Any] = Field(default_factory=dict)
    """Any field of Megatron's TransformerConfig."""
    optimizer: dict[str, Any] = Field(default_factory=dict)
    """Any field of Megatron's OptimizerConfig."""
    lr_schedule: LearningRateSpec = LearningRateSpec()
    """How the learning rate moves from ``optimizer.lr``."""
    ddp: dict[str, Any] = Field(default_factory=dict)
    """Any field of Megatron's DistributedDataParallelConfig."""
    head: Literal["lm", "value", "reward"] = "lm"
    """What stands on the last layer: the language model's output, a value for each token, or a score for each row."""
    bridge: Literal["native", "megatron-bridge"] = "native"
    """Who converts weights between Hugging Face and Megatron."""
    dist_checkpointing_path: Path | None = None
    """Start weights from a folder in Megatron's distributed format, instead of the model's own."""
    fused_linear_cross_entropy: bool = False
    """Compute logits and log-probs together in chunks, twice: slower, and without room for [tokens, vocabulary]."""
    router_replay: bool = False
    """Mixtures only: send tokens to the experts that the generator sent them to (R3), in log-probs and updates."""
    offload: OffloadSpec = OffloadSpec()
    """What waits in host memory."""
    sleep: Sleep = "auto"
    """Leave the GPUs' memory while another engine of the group works (slime's ``--offload-train``); what matters waits
    on the host. ``auto``: on GPUs that it shares with another engine."""


class HfEngineSpec(Section):
    """A Hugging Face model that generates inside its own process: small models, and machines without a GPU."""

    backend: Literal["hf"]
    """Transformers, inside the worker."""
    group: Name
    """The group that holds it: one replica for each rank."""
    follows: Name | None = None
    """The trained engine whose weights it takes before each rollout. Default: the model as it is, for ever."""
    max_batch_size: PositiveInt = 256
    """Sequences decoded at once."""
    sleep: Sleep = "auto"
    """Leave the GPUs' memory while another engine of the group works. ``auto``: on GPUs that it shares with one."""


class WeightSyncSpec(Section):
    """How new weights reach the servers of a SGLang engine."""

    route: Literal["auto", "cuda_ipc", "broadcast", "object_store"] = "auto"
    """``cuda_ipc``: from GPU to the same GPU, where trainer and servers share a group. ``broadcast``: NCCL from the
    trainer to the servers of another group (gloo on CPUs). ``object_store``: through Ray's objects and the host's
    memory, where there is neither. ``auto``: the first that the groups allow; on CPUs the last."""
    bucket_mib: PositiveInt = 256
    """Weights that travel together, in MiB; up to two buckets wait on each side."""
    checksum: bool = False
    """Send everything once more and compare it with what the servers hold; the run ends where they differ."""
    pause: Literal["abort", "retract", "in_place"] = "abort"
    """What happens to responses that are being generated. ``abort`` ends them as they are; ``retract`` computes their
    cache anew with the new weights; ``in_place`` goes on with the cache of the old ones."""


class SglangEngineSpec(Section):
    """SGLang servers that generate, as many as fit on the group."""

    backend: Literal["sglang"]
    """SGLang: its schedulers run in processes of their own, without an HTTP server."""
    group: Name
    """The group that holds them."""
    follows: Name | None = None
    """The trained engine whose weights they take before each rollout. Default: the model as it is, for ever."""
    server: dict[str, Any] = Field(default_factory=dict)
    """Any field of SGLang's ServerArgs. A server takes tp_size x pp_size GPUs, times dp_size without DP attention."""
    weight_sync: WeightSyncSpec = WeightSyncSpec()
    """How new weights reach them."""
    sleep: Sleep = "auto"
    """Leave the GPUs' memory while another engine of the group works: cache, CUDA graphs and weights (verl's
    ``free_cache_engine``, slime's ``--offload-rollout``). ``auto``: on GPUs that they share with another engine."""


EngineSpec = Annotated[MegatronEngineSpec | HfEngineSpec | SglangEngineSpec, Field(discriminator="backend")]


class SamplingSpec(Section):
    """How tokens are drawn, in SGLang's names."""

    temperature: Coefficient = 1.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest set of tokens with at least this probability."""
    top_k: int = -1
    """Likeliest so many tokens; -1 for all."""
    max_new_tokens: PositiveInt
    """Longest response, in tokens."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """End a response, beside the tokenizer's end-of-sequence token. The token that ends it is part of it."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""


class NodeBase(Section):
    """What every node may say."""

    read: dict[str, str] = Field(default_factory=dict)
    """Column the op reads -> where it comes from: another column, or ``node.column``."""
    write: str | dict[str, str] | None = None
    """Name of the column it writes, or (op's name -> name in this pipeline) where it writes several."""


class RolloutNode(NodeBase):
    """Samples `n` responses to each prompt."""

    op: Literal["rollout"]
    """Names this kind of node."""
    engine: Name
    """The engine that generates."""
    n: PositiveInt = 1
    """Responses for each prompt; together they are a group."""
    sampling: SamplingSpec
    """How tokens are drawn in training."""
    val_sampling: SamplingSpec | None = None
    """How they are drawn in validation, one response a prompt. Default: as in training, with temperature 0."""
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

    def prompts_begun(self, prompts_per_step: int) -> int:
        """Prompts that a training step begins."""
        return self.over_sampling_batch_size or prompts_per_step


class RewardNode(NodeBase):
    """Scores each response."""

    op: Literal["reward"]
    """Names this kind of node."""
    fn: str
    """``math``, ``exact``, or your own as ``module:function``."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function."""
    on_error: Literal["stop"] | FiniteFloat = "stop"
    """When the function raises: stop the run and name the sample, or give the sample this reward."""


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


class KlInRewardSpec(Section):
    """Charge the divergence from the reference to the reward, before advantages."""

    coef: Coefficient
    """Weight of the penalty."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Schulman's estimators of the divergence."""


class OverlongBufferSpec(Section):
    """Take points off responses that come near the longest: DAPO's soft overlong punishment."""

    len: PositiveInt
    """Tokens before the rollout's ``max_new_tokens`` in which the penalty grows, from 0 to `penalty_factor`."""
    penalty_factor: Coefficient = 1.0
    """What a response of ``max_new_tokens`` loses."""


class AdvantageNode(NodeBase):
    """Turns rewards into advantages."""

    op: Literal["advantage"]
    """Names this kind of node."""
    estimator: Literal["grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
    """How. The first four compare within a prompt's group: by mean and deviation, by mean alone, with the mean of the
    others, with the mean weighted by length. The last two are whitened over the whole step, as rewards or as deviations
    from their group's mean."""
    normalize_by_std: bool = True
    """``grpo`` only: divide a group's advantages by its standard deviation."""
    kl_in_reward: KlInRewardSpec | None = None
    """Penalty taken off the reward first; with ``reinforce_plus_plus`` token by token, off what is still to come."""
    overlong_buffer: OverlongBufferSpec | None = None
    """Penalty on length, added to the reward first."""


Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class LossSpec(Section):
    """The policy objective."""

    policy: Literal["ppo_clip", "gspo", "cispo", "cpgd", "reinforce"] = "ppo_clip"
    """Form of the policy loss. ``gspo`` clips the ratio of whole responses, ``cispo`` only the weight of a token's
    gradient, from above; ``cpgd`` clips the log of the ratio; ``reinforce`` is the policy gradient without a ratio."""
    clip_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Ratio is kept within 1 - clip_ratio and 1 + clip_ratio; with ``cispo`` there is only the upper bound."""
    clip_ratio_high: Annotated[float, Field(gt=0)] | None = None
    """Upper bound of its own. Default: clip_ratio."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """``ppo_clip`` only: bound on the loss of negative advantages (dual-clip PPO), 3.0 in the paper. Default: none."""
    drift_coef: Coefficient = 0.0
    """``cpgd`` only: weight of the divergence from the policy before the update, 0.01 in the authors' code."""
    kl_coef: Coefficient = 0.0
    """Weight of the divergence from the reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of the divergence."""
    entropy_coef: Coefficient = 0.0
    """Weight of the entropy bonus."""
    aggregation: Aggregation | None = None
    """How token losses become one number, over the global mini-batch; the last divides sums by the rollout's
    ``max_new_tokens``, for Dr. GRPO. Default: token-mean; with ``gspo`` seq-mean-token-mean."""

    @property
    def weighting(self) -> Aggregation:
        """`aggregation`, or what it is by default."""
        return self.aggregation or ("seq-mean-token-mean" if self.policy == "gspo" else "token-mean")


ImportanceLevel = Literal["token", "sequence"]
RatioCriterion = Literal["token", "sequence", "geometric"]
DivergenceCriterion = Literal[
    "token_k2", "token_k3", "seq_sum_k2", "seq_sum_k3", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"
]
RejectionCriterion = RatioCriterion | DivergenceCriterion
Threshold = Annotated[float, Field(gt=0, allow_inf_nan=False)]


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
    """What takes tokens, or whole responses, out of the loss: r of the token, its product over the response, or its
    geometric mean (``geometric``); or the k2 or k3 estimate of the divergence, of the token, or its sum, mean or
    largest over the response."""
    rollout_rs_threshold: Threshold | None = None
    """Largest ratio, or divergence, that stays."""
    rollout_rs_threshold_lower: Threshold | None = None
    """Smallest ratio that stays. Default: 1 / `rollout_rs_threshold`."""
    rollout_token_veto_threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Takes whole responses out of the loss that have a token with r below this, such as 1.0e-4."""


class UpdateNode(NodeBase):
    """Trains an engine on the step's samples."""

    op: Literal["update"]
    """Names this kind of node."""
    engine: Name
    """The engine that is trained."""
    loss: LossSpec = LossSpec()
    """The objective."""
    rollout_correction: RolloutCorrectionSpec | None = None
    """What to do about samples whose log-probs differ between generator and trainer. Default: report, do nothing."""
    mini_batch: PositiveInt | None = None
    """Prompts in one optimizer step. Default: all of the step."""
    epochs: PositiveInt = 1
    """Passes over the step's samples."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Packed tokens in one forward and backward pass of a model replica."""

    def optimizer_steps(self, prompts_per_step: int) -> int:
        """Optimizer steps on one step's batch."""
        return -(-prompts_per_step // (self.mini_batch or prompts_per_step)) * self.epochs

    @property
    def takes_rollout_for_old(self) -> bool:
        """Whether it reads the generator's log-probs as the old ones: verl's ``bypass_mode``."""
        old, rollout = (self.read.get(name, name).rpartition(".")[2] for name in ("old_logprob", "rollout_logprob"))
        return old == rollout


class CustomNode(NodeBase):
    """Your own op, ``module:function``, decorated with `dagrl.node`."""

    op: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
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
    | Annotated[CustomNode, Tag("custom")],
    Discriminator(_node_tag),
]


class ScheduleSpec(Section):
    """How steps overlap."""

    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Policy versions that a sample may be behind the weights it trains. 0 is on-policy."""
    shards_per_step: PositiveInt = 4
    """Pieces of a step's batch, whole groups each: row-wise nodes start on finished ones."""


class RunSpec(Section):
    """How long, how often, how safely."""

    steps: PositiveInt
    """Steps to train."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Source of all randomness."""
    save_every: PositiveInt | None = None
    """Steps between checkpoints. The last step is always saved."""
    keep: PositiveInt = 3
    """Checkpoints that stay."""
    async_save: bool = False
    """Write checkpoints while training goes on; a step's checkpoint counts once it is whole."""
    validate_every: PositiveInt | None = None
    """Steps between validations."""
    validate_first: bool = False
    """Validate before the first step too."""
    resume: Literal["auto", "never"] = "auto"
    """``auto`` goes on from the run folder's newest checkpoint; ``never`` refuses a folder that holds one."""
    host_workers: PositiveInt = 1
    """Processes for the nodes without an engine: prompts, rewards, advantages."""
    samples_per_step: Annotated[int, Field(ge=0)] = 64
    """Samples of each step written to ``samples/step_N.parquet``."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest wait for workers and engines to start."""
    node_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest wait for a sign of life from a running node, a weight sync or a save."""


class ProfileSpec(Section):
    """Which steps to look into, and with what."""

    tool: Literal["torch", "nsys"] = "torch"
    """``torch``: a Chrome trace of each rank in ``profile/``. ``nsys``: NVTX ranges, captured by ``nsys profile``."""
    steps: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """Steps that are profiled."""
    nodes: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """Nodes that are profiled. Default: all that run on an engine."""
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0,)
    """Ranks of each engine that are profiled."""
    with_stack: bool = False
    """Torch only: record the source lines."""
    with_memory: bool = False
    """Torch only: record allocations."""


class Pipeline(Section):
    """A whole pipeline file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Names the run folder and the tracker's run."""
    model: ModelSpec
    """The policy."""
    data: DataSpec
    """The prompts."""
    groups: Annotated[dict[Name, GroupSpec], Field(min_length=1)]
    """GPUs or CPU slots, by name."""
    engines: Annotated[dict[Name, EngineSpec], Field(min_length=1)]
    """Models with a layout on a group, by name."""
    nodes: Annotated[dict[Name, NodeSpec], Field(min_length=1)]
    """The stages of a step, by name."""
    schedule: ScheduleSpec = ScheduleSpec()
    """How steps overlap."""
    run: RunSpec
    """How long, how often, how safely."""
    profile: ProfileSpec | None = None
    """Traces of some steps."""
    track: tuple[Literal["console", "tensorboard", "wandb"], ...] = ("console",)
    """Where metrics go, beside metrics.jsonl."""
