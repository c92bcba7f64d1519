"""Changes of an engine that `dagrl plan` may propose: remedies that make it fit, and layouts that a search tries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.config.errors import Place, dotted
from dagrl.config.schema import DpoNode, EngineSpec, NodeBase, Pipeline, UpdateNode


@dataclass(frozen=True, slots=True)
class Edit:
    """Values to set in a pipeline."""

    values: Mapping[Place, object]

    def overrides(self) -> list[str]:
        """Return them for the command line: ``engines.actor.offload.optimizer=true``."""
        return [f"{dotted(place)}={flow(value)}" for place, value in self.values.items()]

    def __or__(self, other: Edit) -> Edit:
        return Edit({**self.values, **other.values})


class Ladder(NamedTuple):
    """Alternative changes of one kind, the fastest first."""

    rungs: list[Edit]
    last_resort: bool = False
    """Whether it is tried only after all other ladders."""


@dataclass(frozen=True, slots=True)
class Room:
    """The largest split of a model."""

    in_machine: int
    ranks: int


class LayoutChoice(ABC):
    """A layout for all engines of one backend, with their measures to save memory."""

    @property
    @abstractmethod
    def layout(self) -> Hashable:
        """The layout alone: among choices with the same layout, a search keeps the best."""

    @abstractmethod
    def applied(self, pipeline: Pipeline) -> Pipeline:
        """Return the pipeline with this choice."""

    @abstractmethod
    def overrides(self, pipeline: Pipeline) -> Iterator[str]:
        """Yield the same as overrides of the pipeline's file."""

    @abstractmethod
    def label(self) -> str:
        """Return the differences from the defaults, for people."""

    def smaller(self) -> Iterator[LayoutChoice]:
        """Yield the same layout with ways to reduce memory, the fastest first."""
        yield self


def general_ladders(engine: PlannedEngine[EngineSpec]) -> Iterator[Ladder]:
    """Yield remedies for any engine: to sleep, and smaller micro-batches."""
    if engine.spec.sleep is False:
        yield Ladder([Edit({("engines", engine.name, "sleep"): "auto"})])
    for name in engine.executor.engines:
        yield Ladder(_smaller_micro_batches(engine.pipeline, name))


def doubled(size: int, most: int) -> Iterator[int]:
    """Yield 2, 4, ... times `size`, up to `most`."""
    while (size := 2 * size) <= most:
        yield size


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`."""
    return [1, *doubled(1, most)]


def replaced(pipeline: Pipeline, engines: Mapping[str, EngineSpec]) -> Pipeline:
    return pipeline.model_copy(update={"engines": {**pipeline.engines, **engines}})


def flow(value: object) -> str:
    """Return a value as YAML in one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {flow(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(flow, value))}]"
    return str(value)


def _smaller_micro_batches(pipeline: Pipeline, name: str) -> list[Edit]:
    """Return at most half of the tokens of the largest, half of that, and so on, while the longest sample fits."""
    nodes = {node: spec for node, spec in pipeline.packing_nodes.items() if spec.engine == name}
    least = {node: _rows_together(pipeline, spec) * pipeline.longest_row for node, spec in nodes.items()}
    largest = max((spec.tokens_per_micro_batch for spec in nodes.values()), default=0)
    rungs: list[Edit] = []
    smaller: dict[Place, int] = {}
    for most in (largest >> shift for shift in range(1, 5)):
        cut = [node for node, spec in nodes.items() if spec.tokens_per_micro_batch > most >= least[node]]
        if cut:
            # Nodes at their lower bound keep their last size.
            smaller |= {("nodes", node, "tokens_per_micro_batch"): most for node in cut}
            rungs.append(Edit(dict(smaller)))
    return rungs


def _rows_together(pipeline: Pipeline, node: NodeBase) -> int:
    """Return the number of rows that must be in one micro-batch: a pair, or all rows of a prompt if a loss compares
    them.
    """
    if isinstance(node, DpoNode):
        return 2
    compares = isinstance(node, UpdateNode) and node.loss.policy == "opmd_pairwise"
    return max(pipeline.ns.values()) if compares else 1
