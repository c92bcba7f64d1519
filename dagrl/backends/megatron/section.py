"""``backend: megatron``: Megatron-core with 5D parallelism."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from dagrl.backends.megatron.fields import FP8_RECIPE, DdpFields, OptimizerFields, TransformerFields
from dagrl.backends.megatron.lora import LoraSpec
from dagrl.config.capability import Capability
from dagrl.config.coordinates import Coordinates
from dagrl.config.schema.engine import EngineSpec, RowPacking, SentAdapter
from dagrl.config.schema.library_fields import GivenFields, add_extra
from dagrl.config.schema.model import GroupSpec
from dagrl.config.schema.section import Coefficient, PositiveInt, Section


class ParallelSpec(Section):
    """Megatron's parallel layout. The data-parallel size is the remainder: ranks / (tp * pp * cp)."""

    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Stages of layers."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Chunks of layers on each stage, for the interleaved schedule. Default: one, without interleaving."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share each sequence."""
    expert_model_parallel_size: PositiveInt = 1
    """Ranks that share the experts of a mixture; a subdivision of the tensor, context and data-parallel ranks."""
    expert_tensor_parallel_size: PositiveInt = 1
    """Ranks that share each expert's matrices. Default: 1 for any tensor-parallel size: experts stay whole."""
    sequence_parallel: bool = False
    """Split activations between tensor-parallel regions along the sequence."""

    # The field's abbreviations, for rules and plans.

    @property
    def tp(self) -> int:
        return self.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        return self.pipeline_model_parallel_size

    @property
    def vpp(self) -> int | None:
        return self.virtual_pipeline_model_parallel_size

    @property
    def cp(self) -> int:
        return self.context_parallel_size

    @property
    def ep(self) -> int:
        return self.expert_model_parallel_size

    @property
    def etp(self) -> int:
        return self.expert_tensor_parallel_size

    @property
    def chunks(self) -> int:
        return self.vpp or 1

    @property
    def model_ranks(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def expert_ranks(self) -> int:
        return self.ep * self.etp

    @property
    def row_alignment(self) -> int:
        """The length of each packed row is padded to a multiple of this, so that ranks split its tokens evenly."""
        return (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sequence_parallel else 1)

    def data_parallel_size(self, ranks: int) -> int:
        """Model replicas on `ranks` ranks; the sizes are checked to divide when the file is loaded."""
        return ranks // self.model_ranks


class LearningRateSpec(Section):
    """Learning-rate schedule, in Megatron's names; the peak is ``optimizer.lr``."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    """Shape after the warm-up."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear rise from 0, counted in pipeline steps."""
    lr_warmup_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """The same as a fraction of ``run.steps``, rounded down, in place of `lr_warmup_steps`."""
    lr_decay_steps: PositiveInt | None = None
    """Step at which `min_lr` is reached. Default: ``run.steps``."""
    min_lr: Coefficient = 0.0
    """Floor of the decay."""

    def warmup_steps(self, run_steps: int) -> int:
        """Pipeline steps of the warm-up in a run of `run_steps`."""
        if self.lr_warmup_ratio is None:
            return self.lr_warmup_steps
        # Rounded first, because 0.29 * 100 is 28.999999999999996.
        return math.floor(round(self.lr_warmup_ratio * run_steps, 6))


class OffloadSpec(Section):
    """States that stay in host memory while the engine does not use them."""

    param: bool = False
    """Weights, between the engine's tasks."""
    grad: bool = False
    """Gradient buffers, between updates: their memory is freed, as gradients outlive no update."""
    optimizer: bool = False
    """Optimizer states and float32 weights, except during the optimizer's step."""


SHORTEST_SHARED = 16
"""Tokens from which `prefix_sharing` shares a prefix: below, another run costs as much as it saves."""


class MegatronEngineSpec(EngineSpec):
    """A Megatron-core model: trains, and computes log-probs."""

    backend: Literal["megatron"]
    """Megatron-core, with Transformer Engine on GPUs."""
    parallel: ParallelSpec = ParallelSpec()
    """Parallel layout."""
    transformer: GivenFields[TransformerFields] = Field(default_factory=dict)
    """Fields of Megatron's TransformerConfig."""
    optimizer: GivenFields[OptimizerFields] = Field(default_factory=dict)
    """Fields of Megatron's OptimizerConfig."""
    lr_schedule: LearningRateSpec = LearningRateSpec()
    """Schedule of the learning rate; its peak is ``optimizer.lr``."""
    ddp: GivenFields[DdpFields] = Field(default_factory=dict)
    """Fields of Megatron's DistributedDataParallelConfig."""
    extra: dict[Literal["transformer", "optimizer", "ddp"], dict[str, Any]] = Field(default_factory=dict)
    """Further fields of these three sections, which are not tested with dagrl: ``extra: {transformer: {...}}``."""
    head: Literal["lm", "value", "reward"] = "lm"
    """The output layer: the language model's output, a value for each token, or a score for each row."""
    lora: LoraSpec | None = None
    """Train low-rank adapters instead of the weights; ``lora: {}`` takes the defaults."""
    freeze: tuple[Literal["vision"], ...] = ()
    """Parts that updates do not change: the ``vision`` tower with its merger."""
    dist_checkpointing_path: Path | None = None
    """Start weights from a folder in Megatron's distributed format, instead of the model's own."""
    fused_linear_cross_entropy: bool = False
    """Compute logits, log-probs and their gradient together in chunks, without room for [tokens, vocabulary]. For
    losses that compare whole responses logits are computed twice, which is slower."""
    prefix_sharing: bool = False
    """Compute common first tokens of a micro-batch's rows, such as the prompt of a group, once for all rows; log-probs
    and gradients are the same. Rows of a group stay on one data-parallel rank."""
    router_replay: bool = False
    """Mixtures only: in log-probs and updates, send tokens to the experts that the generator chose (R3)."""
    offload: OffloadSpec = OffloadSpec()
    """States that stay in host memory."""
    keep_communicators: bool = True
    """Keep NCCL's communicators on the GPUs while the engine sleeps: half a GiB or more for each process group, some 2
    GiB in all. Closed communicators must reconnect, which takes half a second a step or more."""

    _add_extra = model_validator(mode="after")(add_extra)

    capabilities: ClassVar = frozenset({Capability.SCORE, Capability.JUDGE, Capability.TRAIN})
    holds_frozen_copies: ClassVar = True
    takes_images: ClassVar = True

    @property
    def adapter_dropout(self) -> float | None:
        return None if self.lora is None else self.lora.dropout

    @property
    def sent_adapter(self) -> SentAdapter | None:
        return None if self.lora is None or self.lora.merge else SentAdapter(self.lora.rank, self.lora.alpha)

    @property
    def fp8_recipe(self) -> str | None:
        """The recipe of ``transformer.fp8``; None if linear layers are not computed in fp8."""
        return self.transformer.get("fp8_recipe", FP8_RECIPE) if self.transformer.get("fp8") else None

    @property
    def replays_routes(self) -> bool:
        return self.router_replay

    @property
    def packing(self) -> RowPacking:
        return RowPacking(self.parallel.row_alignment, whole_groups=self.prefix_sharing)

    def layout(self, group: GroupSpec) -> list[Coordinates]:
        return coordinates(self.parallel, group.ranks)

    def layout_text(self, group: GroupSpec) -> str:
        """For example ``tp 2 + sp, pp 4, dp 1``: sizes above 1, tensor and data parallel always."""
        layout = self.parallel
        chunks = f" x {layout.vpp}" if layout.vpp else ""
        sizes = [
            f"tp {layout.tp}" + (" + sp" if layout.sequence_parallel else ""),
            f"pp {layout.pp}{chunks}" if layout.pp > 1 else "",
            *(f"{name} {getattr(layout, name)}" for name in ("cp", "ep", "etp") if getattr(layout, name) > 1),
            f"dp {layout.data_parallel_size(group.ranks)}",
        ]
        return ", ".join(filter(None, sizes))


def coordinates(parallel: ParallelSpec, ranks: int) -> list[Coordinates]:
    """Coordinates of ranks 0, 1, ... in Megatron's order: tp fastest, then cp, dp, pp.

    Experts are laid out again over the ranks of each pipeline stage: etp fastest, then ep, expert dp. The primary of a
    data-parallel rank has tp 0, cp 0 and the last pp.
    """
    dp_size = parallel.data_parallel_size(ranks)
    stage_size = parallel.tp * parallel.cp * dp_size
    assert stage_size * parallel.pp == ranks, f"{parallel} does not divide {ranks} ranks"
    assert stage_size % parallel.expert_ranks == 0, f"the experts of {parallel} do not divide {stage_size} ranks"
    places = []
    for rank in range(ranks):
        pp, in_stage = divmod(rank, stage_size)
        rest, tp = divmod(in_stage, parallel.tp)
        dp, cp = divmod(rest, parallel.cp)
        rest, etp = divmod(in_stage, parallel.etp)
        expert_dp, ep = divmod(rest, parallel.ep)
        primary = tp == 0 and cp == 0 and pp == parallel.pp - 1
        places.append(Coordinates(tp, cp, dp, pp, primary, etp, ep, expert_dp))
    return places


_LARGE_VOCABULARY = 16384


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Rows of a Megatron model's embedding, the same for layouts of up to 8 ranks.

    Large vocabularies are padded to sizes that suit matrix units on every rank.
    """
    unit = 1024 if vocab_size >= _LARGE_VOCABULARY else 8
    multiple = math.lcm(unit, tensor_parallel_size)
    return math.ceil(vocab_size / multiple) * multiple
