"""Clusters, and the ways to place engines on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dagrl.backends.planning.changes import flow
from dagrl.backends.planning.gpus import GPUS_OF_MACHINE
from dagrl.config.schema import EngineSpec, GroupSpec, Pipeline

_MOST_GPUS = 16384
"""Plans name every rank."""
_SPLITS = 8
"""Most ways to divide the GPUs between trainers and generators."""


@dataclass(frozen=True, slots=True)
class Placing:
    """The groups of the engines."""

    groups: Mapping[str, GroupSpec] = field(hash=False)
    trainers: str
    """Group of the engines for training and log-probs."""
    generators: str

    @property
    def together(self) -> bool:
        return self.trainers == self.generators

    def overrides(self, pipeline: Pipeline) -> Iterator[str]:
        """Yield the same as overrides of the pipeline's file."""
        # The file must be loaded with them, because sizes may grow with the machines of its groups.
        yield f"groups={{{', '.join(f'{name}: {_group(group)}' for name, group in self.groups.items())}}}"
        for name, engine in pipeline.engines.items():
            if engine.group is None:
                continue
            if engine.group != self._group_of(engine):
                yield f"engines.{name}.group={self._group_of(engine)}"
            if engine.sleep != "auto":
                yield f"engines.{name}.sleep=auto"
            if engine.generates and engine.weight_sync.route != "auto":
                yield f"engines.{name}.weight_sync.route=auto"

    def _group_of(self, engine: EngineSpec) -> str:
        return self.generators if engine.generates else self.trainers


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines of equal GPUs."""

    nodes: int
    gpus_per_node: int
    gpu: str | None = None
    """Name of the GPUs, if the file has it."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def group(self, gpus: int) -> GroupSpec:
        """A group of that many GPUs: a part of a machine, or whole ones."""
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
    """The requested cluster: `gpus` on machines of 8, or `nodes` of `gpus_per_node`.

    By default all GPUs of the pipeline; `gpu` is their name, if the call has it. ValueError for invalid or too large
    numbers.
    """
    groups = [group for group in pipeline.groups.values() if not group.is_cpu]
    named = {group.gpu for group in groups}
    gpu = named.pop() if len(named) == 1 and None not in named else gpu
    if nodes is not None or gpus_per_node is not None:
        if gpus is not None:
            raise ValueError("--gpus and --nodes with --gpus-per-node say the same twice; give one of them")
        cluster = Cluster(nodes or 1, gpus_per_node or GPUS_OF_MACHINE, gpu)
    elif gpus is not None:
        if gpus > GPUS_OF_MACHINE and gpus % GPUS_OF_MACHINE:
            raise ValueError(f"{gpus} GPUs are no whole machines of {GPUS_OF_MACHINE}; say --nodes and --gpus-per-node")
        cluster = Cluster(max(1, gpus // GPUS_OF_MACHINE), min(gpus, GPUS_OF_MACHINE), gpu)
    elif not groups:
        raise ValueError("the pipeline has no GPUs to lay out; say how many there are with --gpus")
    else:
        total = sum(group.ranks for group in groups)
        fits_one = total <= GPUS_OF_MACHINE and all(group.nodes == 1 for group in groups)
        # Parts of a machine share one if they fit.
        per_node = total if fits_one else max(group.gpus_per_node for group in groups)
        cluster = Cluster(-(-total // per_node), per_node, gpu)
    if cluster.gpus > _MOST_GPUS:
        raise ValueError(f"{cluster.gpus:,} GPUs are more than a search looks at, {_MOST_GPUS:,}; say fewer")
    return cluster


def placings(cluster: Cluster, *, together: bool = False) -> Iterator[Placing]:
    """Yield trainers and generators on the same GPUs and, unless `together`, apart in several proportions."""
    yield Placing({"gpu": cluster.group(cluster.gpus)}, "gpu", "gpu")
    if together:
        return
    unit = 1 if cluster.nodes == 1 else cluster.gpus_per_node
    units = cluster.gpus // unit
    for trainers in _spread(units):
        groups = {"train": cluster.group(trainers * unit), "rollout": cluster.group((units - trainers) * unit)}
        yield Placing(groups, "train", "rollout")


def _spread(units: int) -> list[int]:
    if units - 1 <= _SPLITS:
        return list(range(1, units))
    return sorted({round(units * part / (_SPLITS + 1)) for part in range(1, _SPLITS + 1)})


def _group(group: GroupSpec) -> str:
    return flow(group.model_dump(exclude_defaults=True) | {"nodes": group.nodes})
