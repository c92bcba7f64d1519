"""Engines: models with a layout on a group."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dagrl.config.schema.model import ModelSpec
from dagrl.config.schema.section import Coefficient, Name, PositiveInt, Section

Sleep = Literal["auto"] | bool
"""Whether an engine gives its devices' memory back while another engine of its group works."""


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
    frozen_copy_of: Name | None = None
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
    model: ModelSpec | None = None
    """A model of its own: that of a critic, a reward model or a teacher. Default: the pipeline's."""
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
    on the host. ``auto``: on GPUs that it shares with another engine,
    unless the plan finds room for both."""
    keep_communicators: bool = True
    """Leave NCCL's communicators on the GPUs while the engine sleeps, half a GiB or more for each group that ranks meet
    in, some 2 GiB in all. Closed, each has to connect again: half a second a step, and more."""


class HfEngineSpec(Section):
    """A Hugging Face model inside its own process: a generator of small models, or where no GPU is; or a judge."""

    backend: Literal["hf"]
    """Transformers, inside the worker."""
    group: Name
    """The group that holds it: one replica for each rank."""
    weights_from: Name | None = None
    """The trained engine whose weights it takes before each rollout. Default: the model as it is, for ever."""
    model: ModelSpec | None = None
    """A model of its own, with its own tokenizer and chat template. Default: the pipeline's."""
    head: Literal["lm", "reward"] = "lm"
    """``reward``: a sequence classifier with one label, for ``op: reward_model``. It neither generates nor follows."""
    max_batch_size: PositiveInt = 256
    """Sequences decoded, or scored, at once."""
    sleep: Sleep = "auto"
    """Leave the GPUs' memory while another engine of the group works. ``auto``: on GPUs that it shares with one,
    unless the plan finds room for both."""


class WeightSyncSpec(Section):
    """How new weights reach the servers of a SGLang engine."""

    route: Literal["auto", "cuda_ipc", "broadcast", "object_store"] = "auto"
    """``cuda_ipc``: from GPU to the same GPU, where trainer and servers share a group. ``broadcast``: NCCL from the
    trainer to the servers of another group (gloo on CPUs). ``object_store``: through Ray's objects and the host's
    memory, where there is neither. ``auto``: the first that the groups allow; on CPUs the last."""
    bucket_mib: Annotated[int, Field(ge=1, le=2**16)] = 256
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
    weights_from: Name | None = None
    """The trained engine whose weights they take before each rollout. Default: the model as it is, for ever."""
    model: ModelSpec | None = None
    """A model of its own, with its own tokenizer and chat template. Default: the pipeline's."""
    server: dict[str, Any] = Field(default_factory=dict)
    """Any field of SGLang's ServerArgs. A server takes tp_size x pp_size GPUs, times dp_size without DP attention."""
    weight_sync: WeightSyncSpec = WeightSyncSpec()
    """How new weights reach them."""
    sleep: Sleep = "auto"
    """Leave the GPUs' memory while another engine of the group works: cache, CUDA graphs and weights (verl's
    ``free_cache_engine``, slime's ``--offload-rollout``). ``auto``: on GPUs that they share with another engine,
    unless the plan finds room for both."""


EngineSpec = Annotated[MegatronEngineSpec | HfEngineSpec | SglangEngineSpec, Field(discriminator="backend")]
