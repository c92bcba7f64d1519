"""Checks of parallel layouts: their sizes must fit each other, the ranks of the group, and the model.

Megatron would detect most errors late, when ranks already hold memory and wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.backends.backend import EngineCheck
from dagrl.backends.families.sizes import Size
from dagrl.backends.megatron.report import report
from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec
from dagrl.config.schema import GroupSpec

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
"""Fields of ``transformer:`` for an uneven division of layers, which Megatron checks."""


def check_layout(check: EngineCheck[MegatronEngineSpec]) -> None:
    _check_stages(check)
    _check_experts(check)
    _check_sequence(check)
    _check_widths(check)
    _check_linear_heads(check)
    # Last, as a size that does not fit the model need not fit the ranks.
    _check_ranks(check)


def _check_ranks(check: EngineCheck[MegatronEngineSpec]) -> None:
    name = str(check.engine.group)
    group = check.pipeline.groups.get(name)
    if group is None or not group.ranks:
        return
    for field, message in rank_faults(check.engine.parallel, group, name):
        report(check, f"parallel.{field}" if field else "parallel", message, ("groups", name), "parallel")


def _check_sequence(check: EngineCheck[MegatronEngineSpec]) -> None:
    sizes, model = check.engine.parallel, check.sizes
    if sizes.sequence_parallel and sizes.tp == 1:
        message = "splits along the sequence what tensor-parallel ranks hold"
        report(check, "parallel.sequence_parallel", f"{message}; set {_TP} above 1, or this to false")
    if not sizes.sequence_parallel and sizes.tp > 1 and (model.mixture or model.latent_attention or model.linear_heads):
        kind = "experts" if model.mixture else "latent attention" if model.latent_attention else "gated delta nets"
        message = f"Megatron shares a model with {kind} out over tensor-parallel ranks only if this is true"
        report(check, "parallel.sequence_parallel", f"{message}; set it to true", ("model",), f"parallel.{_TP}")


def _check_stages(check: EngineCheck[MegatronEngineSpec]) -> None:
    stages, chunks, layers = check.engine.parallel.pp, check.engine.parallel.vpp, check.sizes.layers
    if chunks is not None and stages == 1:
        message = f"chunks are interleaved over pipeline stages; set {_PP} above 1, or remove this"
        report(check, f"parallel.{_VPP}", message)
        return
    if chunks == 1:
        message = "a single chunk on each stage is the default; remove it, or choose 2 or more"
        report(check, f"parallel.{_VPP}", message)
        return
    field = "microbatch_group_size_per_vp_stage"
    count = check.engine.transformer.get(field)
    if chunks is not None and count is not None and count < stages:
        message = f"{count} micro-batches at a time leave some of {stages} stages idle, which Megatron refuses; "
        report(check, f"transformer.{field}", f"{message}choose {stages} or more")
    if layers is None or any(check.engine.transformer.get(field) for field in UNEVEN_FIELDS):
        return
    if layers.value % stages:
        remedy = f"choose a divisor, or share them out with `transformer: {{{UNEVEN_FIELDS[0]}: ...}}`"
        _undivided(check, _PP, f"{stages} stages do", layers, remedy)
    elif chunks is not None and layers.value % (stages * chunks):
        remedy = f"choose a divisor of {layers.value // stages}"
        _undivided(check, _VPP, f"{stages} stages of {chunks} chunks do", layers, remedy)


def _check_experts(check: EngineCheck[MegatronEngineSpec]) -> None:
    for field, size in ((_EP, check.sizes.experts), (_ETP, check.sizes.expert_width)):
        parts = getattr(check.engine.parallel, field)
        if check.sizes.mixture is False and parts > 1:
            report(check, f"parallel.{field}", "the model has no experts to share; leave it at 1", ("model",))
        elif check.sizes.mixture is not False and size is not None and size.value % parts:
            _undivided(check, field, f"{parts} does", size, "choose a divisor of it")


def _check_widths(check: EngineCheck[MegatronEngineSpec]) -> None:
    """Report matrices that ranks cannot divide evenly. (The engine pads the vocabulary.)"""
    tensor, model, keys = check.engine.parallel.tp, check.sizes, check.sizes.key_value_heads
    widths = [size for size in (model.heads, model.dense_width, model.shared_width, keys) if size is not None]

    def shares(ranks: int, size: Size) -> bool:
        # With more ranks than key heads, several ranks hold the same head.
        return size.value % ranks == 0 or (size is keys and ranks % size.value == 0)

    if wrong := [size for size in widths if not shares(tensor, size)]:
        named = ", nor its ".join(f"{size.name}, {size.value}" for size in wrong)
        most = model.heads.value if model.heads else min(size.value for size in wrong)
        able = [ranks for ranks in range(1, min(most, 64) + 1) if all(shares(ranks, size) for size in widths)]
        message = f"{tensor} does not divide the model's {named}; choose from: {', '.join(map(str, able))}"
        report(check, f"parallel.{_TP}", message, ("model",))


def _check_linear_heads(check: EngineCheck[MegatronEngineSpec]) -> None:
    """Report heads of gated delta nets that tensor- and context-parallel ranks cannot divide evenly."""
    sizes, heads = check.engine.parallel, check.sizes.linear_heads
    if heads is not None and heads.value % (ranks := sizes.tp * sizes.cp):
        remedy = f"choose {_TP} and {_CP} whose product divides it"
        _undivided(check, _first_above_1(sizes, _TP, _CP), f"{ranks} ranks do", heads, remedy)


def _undivided(check: EngineCheck[MegatronEngineSpec], field: str, parts: str, size: Size, remedy: str) -> None:
    message = f"{parts} not divide the model's {size.name}, {size.value}; {remedy}"
    report(check, f"parallel.{field}", message, ("model",))


def rank_faults(sizes: ParallelSpec, group: GroupSpec, group_name: str) -> Iterator[tuple[str, str]]:
    """Yield a size and its fault if it does not divide a group's ranks."""
    slots = group.gpus_per_node or group.cpus_per_node
    if group.ranks % sizes.model_ranks:
        message = (
            f"one model takes {sizes.model_ranks} ranks, which do not divide the {group.ranks} of group "
            f"`{group_name}`; choose sizes whose product divides {group.ranks}, or change the group"
        )
        yield _first_above_1(sizes, _TP, _PP, _CP), message
        return
    # Ranks that share matrices communicate in every layer. They are consecutive.
    for name in (_TP, _ETP):
        size = getattr(sizes, name)
        if group.nodes > 1 and slots % size:
            message = (
                f"{size} ranks that share matrices would lie on several machines, as each of group "
                f"`{group_name}` has {slots}; choose a divisor of {slots}, and more stages for a large model"
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
