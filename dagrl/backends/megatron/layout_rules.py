"""Parallel layouts: that their sizes fit each other, the ranks of the group, and the model.

Megatron would find most of it out late, when ranks already hold memory and wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.backends.backend import EngineCheck
from dagrl.backends.families.sizes import ModelSizes, Size
from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec
from dagrl.config.errors import Place
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import GroupSpec, Pipeline

_TP = "tensor_model_parallel_size"
_PP = "pipeline_model_parallel_size"
_VPP = "virtual_pipeline_model_parallel_size"
_CP = "context_parallel_size"
_EP = "expert_model_parallel_size"
_ETP = "expert_tensor_parallel_size"
UNEVEN_FIELDS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Fields of ``transformer:`` that share layers out in another way than evenly; Megatron checks those."""


def check_layout(check: EngineCheck[MegatronEngineSpec]) -> None:
    layout = _Layout(check.pipeline, check.name, check.engine, check.findings)
    layout.check_stages(check.sizes)
    layout.check_experts(check.sizes)
    layout.check_sequence(check.sizes)
    layout.check_widths(check.sizes)
    # Last, as a size that does not fit the model need not fit the ranks.
    layout.check_ranks()


class _Layout:
    """The layout of one engine, and where to report."""

    def __init__(self, pipeline: Pipeline, name: str, engine: MegatronEngineSpec, findings: Findings) -> None:
        self._pipeline = pipeline
        self._name = name
        self._engine = engine
        self._sizes = engine.parallel
        self._findings = findings
        self._place: Place = ("engines", name, "parallel")

    def check_ranks(self) -> None:
        """Whether the group's ranks can be shared out."""
        sizes, group = self._sizes, self._pipeline.groups.get(self._engine.group or "")
        if group is None or not group.ranks:
            return
        for name, message in rank_faults(sizes, group, str(self._engine.group)):
            self._error(name, message, ("groups", str(self._engine.group)), self._place)

    def check_sequence(self, model: ModelSizes) -> None:
        """Whether sequence parallelism is there where it must be, and only there where it can be."""
        place, tensor = "sequence_parallel", self._sizes.tp
        if self._sizes.sequence_parallel and tensor == 1:
            message = "splits along the sequence what tensor-parallel ranks hold"
            self._error(place, f"{message}; set {_TP} above 1, or this to false")
        if not self._sizes.sequence_parallel and tensor > 1 and (model.mixture or model.latent_attention):
            kind = "experts" if model.mixture else "latent attention"
            message = f"Megatron shares a model with {kind} out over tensor-parallel ranks only if this is true"
            self._error(place, f"{message}; set it to true", ("model",), (*self._place, _TP))

    def check_stages(self, model: ModelSizes) -> None:
        """Whether layers, stages and chunks fit."""
        stages, chunks = self._sizes.pp, self._sizes.vpp
        if chunks is not None and stages == 1:
            self._error(_VPP, f"chunks are interleaved over pipeline stages; set {_PP} above 1, or remove this")
            return
        if chunks == 1:
            self._error(_VPP, "a single chunk on each stage is the default; remove it, or choose 2 or more")
            return
        if chunks is not None:
            self._check_rounds(stages)
        if model.layers is None or any(self._engine.transformer.get(field) for field in UNEVEN_FIELDS):
            return
        layers = model.layers
        if layers.value % stages:
            remedy = f"choose a divisor, or share them out with `transformer: {{{UNEVEN_FIELDS[0]}: ...}}`"
            self._undivided(_PP, f"{stages} stages do", layers, remedy)
        elif chunks is not None and layers.value % (stages * chunks):
            remedy = f"choose a divisor of {layers.value // stages}"
            self._undivided(_VPP, f"{stages} stages of {chunks} chunks do", layers, remedy)

    def _check_rounds(self, stages: int) -> None:
        field = "microbatch_group_size_per_vp_stage"
        each = self._engine.transformer.get(field)
        if each is not None and each < stages:
            message = f"{each} micro-batches at a time leave some of {stages} stages idle, which Megatron refuses; "
            self._findings.error(("engines", self._name, "transformer", field), f"{message}choose {stages} or more")

    def check_experts(self, model: ModelSizes) -> None:
        """Whether there are experts, and ranks share them evenly."""
        sizes = self._sizes
        if model.mixture is False:
            for name in (_EP, _ETP):
                if getattr(sizes, name) > 1:
                    self._error(name, "the model has no experts to share; leave it at 1", ("model",))
            return
        self._divides(_EP, model.experts)
        self._divides(_ETP, model.expert_width)

    def check_widths(self, model: ModelSizes) -> None:
        """Whether tensor-parallel ranks share every matrix evenly. (The vocabulary is padded by the engine.)"""
        tensor, keys = self._sizes.tp, model.key_value_heads
        widths = [size for size in (model.heads, model.dense_width, model.shared_width, keys) if size is not None]

        def shares(ranks: int, size: Size) -> bool:
            # With more ranks than key heads, several ranks hold the same head.
            return size.value % ranks == 0 or (size is keys and ranks % size.value == 0)

        if wrong := [size for size in widths if not shares(tensor, size)]:
            named = ", nor its ".join(f"{size.name}, {size.value}" for size in wrong)
            most = model.heads.value if model.heads else min(size.value for size in wrong)
            able = [ranks for ranks in range(1, min(most, 64) + 1) if all(shares(ranks, size) for size in widths)]
            message = f"{tensor} does not divide the model's {named}; choose from: {', '.join(map(str, able))}"
            self._error(_TP, message, ("model",))

    def _divides(self, name: str, size: Size | None) -> None:
        parts = getattr(self._sizes, name)
        if size is not None and size.value % parts:
            self._undivided(name, f"{parts} does", size, "choose a divisor of it")

    def _undivided(self, name: str, parts: str, size: Size, remedy: str) -> None:
        self._error(name, f"{parts} not divide the model's {size.name}, {size.value}; {remedy}", ("model",))

    def _error(self, name: str, message: str, *depends_on: Place) -> None:
        place = (*self._place, name) if name else self._place
        self._findings.error(place, message, depends_on=depends_on)


def rank_faults(sizes: ParallelSpec, group: GroupSpec, group_name: str) -> Iterator[tuple[str, str]]:
    """Yield a size, and the fault, where a group's ranks cannot be shared out."""
    each = group.gpus_per_node or group.cpus_per_node
    if group.ranks % sizes.model_ranks:
        message = (
            f"one model takes {sizes.model_ranks} ranks, which do not divide the {group.ranks} of group "
            f"`{group_name}`; choose sizes whose product divides {group.ranks}, or change the group"
        )
        yield _first_above_1(sizes, _TP, _PP, _CP), message
        return
    # Ranks that share matrices talk in every layer. They are consecutive.
    for name in (_TP, _ETP):
        size = getattr(sizes, name)
        if group.nodes > 1 and each % size:
            message = (
                f"{size} ranks that share matrices would lie on several machines, as each of group "
                f"`{group_name}` has {each}; choose a divisor of {each}, and more stages for a large model"
            )
            yield name, message
    stage_ranks = group.ranks // sizes.pp
    if stage_ranks % sizes.expert_ranks:
        message = (
            f"one set of experts takes {sizes.expert_ranks} ranks, which do not divide the {stage_ranks} of a pipeline "
            f"stage; choose {_EP} and {_ETP} whose product divides {stage_ranks}"
        )
        yield _first_above_1(sizes, _EP, _ETP), message


def _first_above_1(sizes: ParallelSpec, *names: str) -> str:
    return next((name for name in names if getattr(sizes, name) > 1), "")
