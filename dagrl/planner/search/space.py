"""The choices that there are for a model on a cluster: every one divides what has to be divided.

Pruned is what hardly ever pays: tensor parallelism across machines, more context-parallel ranks than rows are long for,
pipeline stages without micro-batches for them, layouts whose ranks outnumber the step's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.section import ParallelSpec
from dagrl.config.schema import GroupSpec, Pipeline
from dagrl.planner.hardware import GPUS_OF_MACHINE
from dagrl.planner.search.choices import Placing, ServerChoice

_TOKENS_OF_CONTEXT_RANK = 8192
"""Rows that are shorter than that for each context-parallel rank are not worth sharing."""
_MOST_TENSOR_RANKS = 8
_CHUNKS = (None, 2, 4)
_FRACTIONS = (0.85, 0.7, 0.5, 0.3)
"""Of a GPU's memory, for weights and cache of a server: the smaller ones leave room for a trainer that stays."""
_BUDGETS = (8192, 16384, 32768, 65536)
"""Tokens of a micro-batch."""
_MOST_GPUS = 16384
"""Plans name every rank."""
_SPLITS = 8
"""Ways in which the GPUs are split between trainers and servers, at most."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines of equal GPUs."""

    nodes: int
    gpus_per_node: int
    gpu: str | None = None
    """What they are, where the file says so."""

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.nodes * self.gpus_per_node

    def group(self, gpus: int) -> GroupSpec:
        """So many of them: a part of a machine, or whole ones."""
        if gpus < self.gpus_per_node:
            return GroupSpec(nodes=1, gpus_per_node=gpus, gpu=self.gpu)
        assert gpus % self.gpus_per_node == 0, f"{gpus} GPUs are parts of machines"
        return GroupSpec(nodes=gpus // self.gpus_per_node, gpus_per_node=self.gpus_per_node, gpu=self.gpu)


def cluster_of(
    pipeline: Pipeline,
    *,
    gpus: int | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpu: str | None = None,
) -> Cluster:
    """The cluster that a call asks for: so many `gpus`, on machines of 8 where there are more, or so many `nodes`; by
    default all GPUs of the pipeline. `gpu` is their name where the call says it. ValueError for what is no cluster, or
    a larger one than a search has an end on.
    """
    found = _cluster_of(pipeline, gpus, nodes, gpus_per_node, gpu)
    if found.gpus > _MOST_GPUS:
        raise ValueError(f"{found.gpus:,} GPUs are more than a search looks at, {_MOST_GPUS:,}; say fewer")
    return found


def _cluster_of(
    pipeline: Pipeline, gpus: int | None, nodes: int | None, gpus_per_node: int | None, gpu: str | None
) -> Cluster:
    groups = [group for group in pipeline.groups.values() if not group.is_cpu]
    named = {group.gpu for group in groups}
    gpu = named.pop() if len(named) == 1 and None not in named else gpu
    if nodes is not None or gpus_per_node is not None:
        if gpus is not None:
            raise ValueError("--gpus and --nodes with --gpus-per-node say the same twice; give one of them")
        return Cluster(nodes or 1, gpus_per_node or GPUS_OF_MACHINE, gpu)
    if gpus is not None:
        if gpus > GPUS_OF_MACHINE and gpus % GPUS_OF_MACHINE:
            raise ValueError(f"{gpus} GPUs are no whole machines of {GPUS_OF_MACHINE}; say --nodes and --gpus-per-node")
        return Cluster(max(1, gpus // GPUS_OF_MACHINE), min(gpus, GPUS_OF_MACHINE), gpu)
    if not groups:
        raise ValueError("the pipeline has no GPUs to lay out; say how many there are with --gpus")
    total = sum(group.ranks for group in groups)
    if total <= GPUS_OF_MACHINE and all(group.nodes == 1 for group in groups):
        return Cluster(1, total, gpu)
    # Parts of a machine are on one together, as far as they go.
    largest = max(group.gpus_per_node for group in groups)
    return Cluster(-(-total // largest), largest, gpu)


def placings(cluster: Cluster, *, together: bool = False) -> Iterator[Placing]:
    """Trainers and servers on the same GPUs, and, unless they are to be `together`, apart in several proportions."""
    yield Placing({"gpu": cluster.group(cluster.gpus)}, "gpu", "gpu")
    if together:
        return
    unit = 1 if cluster.nodes == 1 else cluster.gpus_per_node
    units = cluster.gpus // unit
    for trainers in _spread(units):
        groups = {"train": cluster.group(trainers * unit), "rollout": cluster.group((units - trainers) * unit)}
        yield Placing(groups, "train", "rollout")


def layouts(shape: ModelShape, group: GroupSpec, longest_row: int, rows: int) -> Iterator[ParallelSpec]:
    """Layouts of a trainer on a group, for rows of up to so many tokens, `rows` of them in an optimizer step."""
    for tensor, context in product(_powers(min(group.gpus_per_node, _MOST_TENSOR_RANKS)), _powers(_MOST_TENSOR_RANKS)):
        if not _shares_widths(shape, tensor) or context * _TOKENS_OF_CONTEXT_RANK > max(longest_row, 8192):
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


def budgets(parallel: ParallelSpec, longest_row: int) -> Iterator[int]:
    """Tokens of a micro-batch, enough for the longest row."""
    padded = -(-longest_row // parallel.row_alignment) * parallel.row_alignment
    found = [budget for budget in _BUDGETS if budget >= padded]
    yield from found or [padded]


def servers(shape: ModelShape, group: GroupSpec) -> Iterator[ServerChoice]:
    """Layouts of servers on a group, within its machines."""
    for tensor, fraction in product(_powers(min(group.gpus_per_node, _MOST_TENSOR_RANKS)), _FRACTIONS):
        keys = shape.key_value_heads
        shared = shape.heads % tensor == 0 and (shape.latent or keys % tensor == 0 or tensor % keys == 0)
        if shared and group.gpus_per_node % tensor == 0:
            yield ServerChoice(tensor, fraction)


def _spread(units: int) -> list[int]:
    """From 1 to `units` - 1, all or some that lie evenly."""
    if units - 1 <= _SPLITS:
        return list(range(1, units))
    return sorted({round(units * part / (_SPLITS + 1)) for part in range(1, _SPLITS + 1)})


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _shares_widths(shape: ModelShape, tensor: int) -> bool:
    """Whether so many ranks share every matrix evenly; `dagrl.backends.megatron.layout_rules` asks the same."""
    widths = [shape.heads]
    if not all(shape.is_mixture(layer) for layer in shape.positions):
        widths.append(shape.dense_width)
    if shape.experts and shape.experts.shared_width:
        widths.append(shape.experts.shared_width)
    if any(width % tensor for width in widths):
        return False
    keys = shape.key_value_heads
    return bool(shape.latent) or keys % tensor == 0 or tensor % keys == 0


def _chunks(shape: ModelShape, stages: int) -> list[int | None]:
    if stages == 1:
        return [None]
    return [chunks for chunks in _CHUNKS if shape.layers % (stages * (chunks or 1)) == 0]


def _expert_ranks(shape: ModelShape, stage_ranks: int) -> list[int]:
    if shape.experts is None:
        return [1]
    most = min(stage_ranks, shape.experts.count)
    return [ranks for ranks in _powers(most) if stage_ranks % ranks == 0 and shape.experts.count % ranks == 0]
