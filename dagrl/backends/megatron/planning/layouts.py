"""Changes of Megatron engines: remedies that reduce memory, and layouts that a search tries.

A search has thousands of layouts, so a choice changes a pipeline directly; its overrides are equivalent. Layouts that
rarely pay off are omitted: tensor parallelism across machines, more context-parallel ranks than long rows need, more
pipeline stages than micro-batches, more replicas than rows of an optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from typing_extensions import TypeIs

from dagrl.backends.families.config_fields import MegatronFields
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.layout_rules import UNEVEN_FIELDS
from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec
from dagrl.backends.planning.changes import (
    Edit,
    Ladder,
    LayoutChoice,
    Room,
    doubled,
    flow,
    general_ladders,
    powers_of_two,
    replaced,
)
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.config.schema import EngineSpec, GroupSpec, Pipeline, TrainingNode

_LAYOUT_FIELDS = (*UNEVEN_FIELDS, "microbatch_group_size_per_vp_stage")
"""Fields of ``transformer:`` that belong to the file's own layout."""
_FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_RECOMPUTE: Mapping[str, MegatronFields] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": _FULL_RECOMPUTE,
}
RECOMPUTE = tuple(_RECOMPUTE)
"""Names of recomputation settings, from the fastest to the smallest."""
_CHOSEN_FIELDS = (*_FULL_RECOMPUTE, "recompute_modules", *_LAYOUT_FIELDS)
_TOKENS_OF_CONTEXT_RANK = 8192
"""Rows with fewer tokens for each context-parallel rank are not worth splitting."""
_MOST_RANKS = 8
"""Most tensor-parallel or context-parallel ranks."""
_CHUNKS = (None, 2, 4)
_BUDGETS = (8192, 16384, 32768, 65536)
"""Tokens of a micro-batch."""


@dataclass(frozen=True, slots=True)
class MegatronLayout(LayoutChoice):
    """A layout of trained engines, with their measures to save memory."""

    parallel: ParallelSpec
    recompute: str = "none"
    offload_optimizer: bool = False
    tokens_per_micro_batch: int = 16384

    @property
    def layout(self) -> ParallelSpec:
        return self.parallel

    def applied(self, pipeline: Pipeline) -> Pipeline:
        engines = {name: self._engine(engine) for name, engine in pipeline.engines.items() if _is_chosen(engine)}
        budget = {"tokens_per_micro_batch": self.tokens_per_micro_batch}
        packed = {name: node.model_copy(update=budget) for name, node in pipeline.packing_nodes.items()}
        return replaced(pipeline, engines).model_copy(update={"nodes": {**pipeline.nodes, **packed}})

    def overrides(self, pipeline: Pipeline) -> Iterator[str]:
        for name, engine in pipeline.engines.items():
            if not _is_chosen(engine):
                continue
            if engine.parallel != self.parallel:
                yield f"engines.{name}.parallel={flow(self.parallel.model_dump(exclude_defaults=True))}"
            transformer = self._transformer(engine)
            for key in _CHOSEN_FIELDS:
                if engine.transformer.get(key) != transformer.get(key):
                    yield f"engines.{name}.transformer.{key}={flow(transformer.get(key))}"
            if engine.offload.optimizer != self.offload_optimizer:
                yield f"engines.{name}.offload.optimizer={flow(self.offload_optimizer)}"
        for name, node in pipeline.packing_nodes.items():
            if node.tokens_per_micro_batch != self.tokens_per_micro_batch:
                yield f"nodes.{name}.tokens_per_micro_batch={self.tokens_per_micro_batch}"

    def label(self) -> str:
        sizes = self.parallel
        names = {"TP": sizes.tp, "PP": sizes.pp, "VPP": sizes.chunks, "CP": sizes.cp, "EP": sizes.ep}
        words = [f"{name}{size}" for name, size in names.items() if size > 1] or ["DP only"]
        if self.recompute != "none":
            words.append(f"recompute {self.recompute}")
        if self.offload_optimizer:
            words.append("offload optimizer")
        return " ".join([*words, f"{self.tokens_per_micro_batch // 1024}k"])

    def smaller(self) -> Iterator[MegatronLayout]:
        """Yield the same layout with recomputation and an offloaded optimizer, the fastest first."""
        for offload, recompute in product((False, True), RECOMPUTE):
            yield replace(self, recompute=recompute, offload_optimizer=offload)

    def _engine(self, engine: MegatronEngineSpec) -> MegatronEngineSpec:
        offload = engine.offload.model_copy(update={"optimizer": self.offload_optimizer})
        changes = {"parallel": self.parallel, "transformer": self._transformer(engine), "offload": offload}
        return engine.model_copy(update=changes)

    def _transformer(self, engine: MegatronEngineSpec) -> MegatronFields:
        kept = {key: value for key, value in engine.transformer.items() if key not in _CHOSEN_FIELDS}
        return kept | _RECOMPUTE[self.recompute]


ANY_LAYOUT = MegatronLayout(ParallelSpec())
"""It fits every group."""


def ladders(engine: PlannedEngine[MegatronEngineSpec], room: Room) -> Iterator[Ladder]:
    """Yield ways to reduce memory, the fastest first."""
    spec, shape = engine.spec, engine.shape
    sizes = spec.parallel

    def change(section: str, **values: object) -> Edit:
        return Edit({("engines", engine.name, section, key): value for key, value in values.items()})

    def split(key: str, most: int, **also: object) -> Ladder:
        return Ladder([change("parallel", **{key: size}, **also) for size in doubled(sizes.model_dump()[key], most)])

    if spec.sleep is not False and spec.keep_communicators:
        yield Ladder([Edit({("engines", engine.name, "keep_communicators"): False})])
    yield from general_ladders(engine)
    if spec.transformer.get("recompute_granularity") != "full":
        yield Ladder([change("transformer", **_FULL_RECOMPUTE)])
    if not spec.fused_linear_cross_entropy and spec.head == "lm":
        yield Ladder([Edit({("engines", engine.name, "fused_linear_cross_entropy"): True})])
    yield split("tensor_model_parallel_size", room.in_machine, sequence_parallel=True)
    if sizes.tp > 1 and not sizes.sequence_parallel:
        yield Ladder([change("parallel", sequence_parallel=True)])
    yield split("pipeline_model_parallel_size", room.ranks)
    if shape.experts is not None:
        yield split("expert_model_parallel_size", min(room.ranks, shape.experts.count))
    away = [] if spec.offload.optimizer else [change("offload", optimizer=True)]
    if not spec.optimizer.get("optimizer_cpu_offload"):
        away.append(change("optimizer", optimizer_cpu_offload=True))
    yield Ladder(away)


def layouts(pipeline: Pipeline, shapes: Sequence[ModelShape], group: GroupSpec) -> Iterator[MegatronLayout]:
    """Yield the layouts on a group that suit all of these models."""
    longest = pipeline.longest_row
    updates = [node for node in pipeline.nodes.values() if isinstance(node, TrainingNode)]
    prompts = min(node.mini_batch or pipeline.data.prompts_per_step for node in updates)
    first, *others = (
        dict.fromkeys(parallels(shape, group, longest, prompts * pipeline.rows_per_prompt())) for shape in shapes
    )
    for parallel in first:
        if all(parallel in theirs for theirs in others):
            for budget in _budgets(parallel, longest):
                yield MegatronLayout(parallel, tokens_per_micro_batch=budget)


def parallels(shape: ModelShape, group: GroupSpec, longest: int, rows: int) -> Iterator[ParallelSpec]:
    """Yield the parallel sizes for rows of up to `longest` tokens, with `rows` of them in an optimizer step."""
    in_machine = min(group.gpus_per_node, _MOST_RANKS)
    for tensor, context in product(powers_of_two(in_machine), powers_of_two(_MOST_RANKS)):
        if not _divides_widths(shape, tensor, context) or context * _TOKENS_OF_CONTEXT_RANK > max(longest, 8192):
            continue
        for stages in range(1, shape.layers + 1):
            model_ranks = tensor * context * stages
            if group.ranks % model_ranks or shape.layers % stages or group.ranks // model_ranks > rows:
                continue
            for chunks, experts in product(_chunks(shape, stages), _expert_ranks(shape, group.ranks // stages)):
                yield ParallelSpec(
                    tensor_model_parallel_size=tensor,
                    pipeline_model_parallel_size=stages,
                    virtual_pipeline_model_parallel_size=chunks,
                    context_parallel_size=context,
                    expert_model_parallel_size=experts,
                    sequence_parallel=tensor > 1,
                )


def _is_chosen(engine: EngineSpec) -> TypeIs[MegatronEngineSpec]:
    return isinstance(engine, MegatronEngineSpec) and engine.frozen_copy_of is None


def _budgets(parallel: ParallelSpec, longest: int) -> list[int]:
    padded = -(-longest // parallel.row_alignment) * parallel.row_alignment
    return [budget for budget in _BUDGETS if budget >= padded] or [padded]


def _divides_widths(shape: ModelShape, tensor: int, context: int) -> bool:
    """Whether the ranks divide every matrix; `dagrl.backends.megatron.layout_rules` checks the same."""
    if shape.linear and shape.linear.key_heads % (tensor * context):
        return False
    widths = [shape.heads]
    if not all(shape.is_mixture(layer) for layer in shape.positions):
        widths.append(shape.dense_width)
    if shape.experts and shape.experts.shared_width:
        widths.append(shape.experts.shared_width)
    keys = shape.key_value_heads
    whole_heads = bool(shape.latent) or keys % tensor == 0 or tensor % keys == 0
    return whole_heads and not any(width % tensor for width in widths)


def _chunks(shape: ModelShape, stages: int) -> list[int | None]:
    if stages == 1:
        return [None]
    return [chunks for chunks in _CHUNKS if shape.layers % (stages * (chunks or 1)) == 0]


def _expert_ranks(shape: ModelShape, stage_ranks: int) -> list[int]:
    if shape.experts is None:
        return [1]
    count = shape.experts.count
    return [ranks for ranks in powers_of_two(min(stage_ranks, count)) if stage_ranks % ranks == 0 == count % ranks]
